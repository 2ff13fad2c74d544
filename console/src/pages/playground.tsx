// A chat that streams, with its cost beside it, and the code of the call.

import { useRef, useState } from "react";
import {
  Input,
  Label,
  Tab,
  TabList,
  TabPanel,
  Tabs,
  TextArea,
  TextField,
} from "react-aria-components";
import type { ModelJson, PriceJson } from "../gen/weir/v1/inference_service_pb.js";
import { CHAT_PATH, chat } from "../client.js";
import type { ChatPart } from "../client.js";
import { PICOS, count, decimal, milliseconds, minorDigits, rate } from "../format.js";
import { digits } from "../parts/actions.js";
import {
  Button,
  Choice,
  Copy,
  Empty,
  Id,
  Note,
  Problem,
  Remark,
  Tile,
  Tiles,
} from "../parts/basics.js";
import { LANGUAGES, snippet } from "../snippets.js";
import type { Asked } from "../snippets.js";
import { text } from "../texts.js";
import { Show, addressOf, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const MODELS = "InferenceService/ListModels";
const t = text.playground;

export const playground: Page = {
  id: "playground",
  title: text.pages.playground,
  calls: [MODELS],
  Show: Playground,
};

function Playground() {
  const found = useLoaded((caller) => caller(MODELS));
  return (
    <Show of={found}>
      {({ models = [] }) => {
        const chats = models.filter((each) => each.task !== "MODEL_TASK_EMBED");
        return chats.length > 0 ? <Chat models={chats} /> : <Remark>{t.noModels}</Remark>;
      }}
    </Show>
  );
}

interface Run {
  output: string;
  chunkCount: number;
  startedMs: number;
  firstMs: number | null;
  end: ChatPart;
  requestId: string;
}

const NOTHING: Run = {
  output: "",
  chunkCount: 0,
  startedMs: 0,
  firstMs: null,
  end: {},
  requestId: "",
};

// The run with another part of its answer.
function withPart(run: Run, part: ChatPart): Run {
  return {
    ...run,
    output: run.output + (part.delta ?? ""),
    chunkCount: run.chunkCount + (part.delta ? 1 : 0),
    firstMs: run.firstMs ?? (part.delta ? performance.now() : null),
    requestId: part.requestId || run.requestId,
    end: { ...run.end, ...part },
  };
}

function bodyOf(asked: Asked): { model: string; messages: object[] } {
  return {
    model: asked.model,
    messages: [
      ...(asked.system ? [{ role: "system", content: asked.system }] : []),
      { role: "user", content: asked.prompt },
    ],
    ...(asked.maxTokens ? { max_completion_tokens: asked.maxTokens } : {}),
    ...(asked.temperature === null ? {} : { temperature: asked.temperature }),
  };
}

function Chat({ models }: { models: ModelJson[] }) {
  const view = useView();
  const [model, setModel] = useState(view.asked("model") || (models[0]?.name ?? ""));
  const [system, setSystem] = useState("");
  const [prompt, setPrompt] = useState(t.example);
  const [most, setMost] = useState("200");
  const [temperature, setTemperature] = useState("");
  const [run, setRun] = useState<Run>(NOTHING);
  const [error, setError] = useState<unknown>(null);
  const [isRunning, setRunning] = useState(false);
  const stop = useRef<AbortController | null>(null);
  const asked: Asked = {
    model,
    system,
    prompt,
    maxTokens: Number(digits(most)) || null,
    temperature: temperature.trim() === "" ? null : Number(temperature),
  };
  const start = async () => {
    const controller = new AbortController();
    stop.current = controller;
    setRunning(true);
    setError(null);
    setRun({ ...NOTHING, startedMs: performance.now() });
    try {
      for await (const part of chat(bodyOf(asked), controller.signal))
        setRun((before) => withPart(before, part));
      view.say(t.ended);
    } catch (failure) {
      if (!controller.signal.aborted) setError(failure);
    }
    setRunning(false);
  };
  return (
    <>
      <form
        className="playground"
        onSubmit={(event) => {
          event.preventDefault();
          void start();
        }}
      >
        <div className="controls">
          <Choice
            name={text.model}
            options={models.map((each) => [each.name ?? "", each.name ?? ""])}
            value={model}
            onChange={setModel}
          />
          <Entry label={t.most} value={most} onChange={setMost} />
          <Entry
            label={t.temperature}
            value={temperature}
            onChange={setTemperature}
            placeholder={t.ofTheModel}
          />
        </div>
        <Area label={t.system} value={system} onChange={setSystem} rows={2} />
        <Area label={t.prompt} value={prompt} onChange={setPrompt} rows={5} />
        <div className="buttons">
          {isRunning ? (
            <Button kind="danger" onPress={() => stop.current?.abort()}>
              {t.stop}
            </Button>
          ) : (
            <Button type="submit" kind="primary" isDisabled={!prompt.trim()}>
              {t.send}
            </Button>
          )}
        </div>
      </form>
      <h2>{t.answer}</h2>
      {error !== null && <Problem of={error} />}
      {run.output ? (
        <pre className="answer" aria-live="polite" aria-busy={isRunning} tabIndex={0}>
          {run.output}
        </pre>
      ) : (
        <Empty>{isRunning ? t.waiting : t.nothing}</Empty>
      )}
      <Figures run={run} price={models.find((each) => each.name === model)?.price} />
      <h2>{t.code}</h2>
      <Code asked={asked} />
    </>
  );
}

function Entry({
  label,
  value,
  onChange,
  placeholder,
}: {
  label: string;
  value: string;
  onChange: (value: string) => void;
  placeholder?: string;
}) {
  return (
    <TextField
      className="field short"
      value={value}
      onChange={onChange}
      inputMode="decimal"
      autoComplete="off"
    >
      <Label>{label}</Label>
      <Input placeholder={placeholder} />
    </TextField>
  );
}

function Area({
  label,
  value,
  onChange,
  rows,
}: {
  label: string;
  value: string;
  onChange: (value: string) => void;
  rows: number;
}) {
  return (
    <TextField className="field wide" value={value} onChange={onChange}>
      <Label>{label}</Label>
      <TextArea rows={rows} />
    </TextField>
  );
}

// Cost so far: the output at the price of the model, a chunk counted as one token, until the server
// sends the exact cost at the end.
export function costSoFar(run: Pick<Run, "chunkCount">, price: PriceJson | undefined): bigint {
  return BigInt(run.chunkCount) * BigInt(price?.outputPicosPerToken ?? 0);
}

function Figures({ run, price }: { run: Run; price: PriceJson | undefined }) {
  const view = useView();
  const { usage, cost, timings, finishReason } = run.end;
  const currency = cost?.currency_code ?? price?.currencyCode ?? "";
  const picos = cost ? BigInt(cost.picos) : costSoFar(run, price);
  const ttft = timings?.ttft_ms ?? (run.firstMs === null ? null : run.firstMs - run.startedMs);
  const { unit } = text.tokens;
  return (
    <>
      <Tiles>
        <Tile
          name={text.cost}
          value={decimal(picos, PICOS, minorDigits(currency))}
          unit={currency}
          note={cost ? t.exact : t.soFar}
        />
        {usage && (
          <Tile
            name={text.tokens.input}
            value={count(usage.prompt_tokens)}
            unit={unit}
            note={t.cached(count(usage.prompt_tokens_details?.cached_tokens ?? 0))}
          />
        )}
        <Tile
          name={text.tokens.output}
          value={count(usage?.completion_tokens ?? run.chunkCount)}
          unit={unit}
          note={finishReason ? t.finished(finishReason) : ""}
        />
        <Tile name={t.ttft} value={ttft === null ? text.none : milliseconds(ttft)} />
        {timings && (
          <Tile name={t.speed} value={rate(timings.tokens_per_second)} unit={t.tokensPerSecond} />
        )}
      </Tiles>
      {run.requestId && (
        <Note>
          {t.request}{" "}
          {view.may("InferenceService/GetGeneration") ? (
            <a className="id" href={addressOf("requests", { id: run.requestId })}>
              {run.requestId}
            </a>
          ) : (
            <Id of={run.requestId} />
          )}
        </Note>
      )}
    </>
  );
}

function Code({ asked }: { asked: Asked }) {
  const address = new URL(CHAT_PATH.replace("/chat/completions", ""), location.href).href;
  return (
    <Tabs className="tabs">
      <TabList aria-label={t.code} className="tablist">
        {LANGUAGES.map(([id, name]) => (
          <Tab key={id} id={id} className="tab">
            {name}
          </Tab>
        ))}
      </TabList>
      {LANGUAGES.map(([id]) => (
        <TabPanel key={id} id={id} className="tabpanel">
          <pre tabIndex={0}>{snippet(id, asked, address)}</pre>
          <Copy of={snippet(id, asked, address)} />
        </TabPanel>
      ))}
    </Tabs>
  );
}
