// Running requests and the models that serve them.

import { useEffect, useState } from "react";
import type {
  LiveRequestJson,
  ListLiveRequestsResponseJson,
  LiveOrganizationJson,
} from "../gen/weir/v1/live_requests_pb.js";
import type { ModelJson } from "../gen/weir/v1/inference_service_pb.js";
import { count, perMillion, rate, secondsOf, wait, whole, words } from "../format.js";
import { Action } from "../parts/actions.js";
import { AsOf, Badge, Command, Note, Remark, Tile, Tiles } from "../parts/basics.js";
import { Lines } from "../parts/charts.js";
import type { Sample } from "../parts/charts.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const LIVE_MS = 2000;
const MODELS_MS = 10_000;
const SAMPLES_MAX = 150; // five minutes
const LIVE = "AdminService/ListLiveRequests";
const MODELS = "InferenceService/ListModels";
const WAITING = new Set([
  "REQUEST_PHASE_PREPARING",
  "REQUEST_PHASE_QUEUED",
  "REQUEST_PHASE_LOADING",
]);
const t = text.overview;

export const overview: Page = {
  id: "overview",
  title: text.pages.overview,
  calls: [LIVE, MODELS],
  Show: Overview,
};

function Overview() {
  const view = useView();
  return (
    <>
      {view.may(LIVE) ? <Live /> : <Remark>{t.onlyModels}</Remark>}
      {view.may(MODELS) && <Models />}
    </>
  );
}

function Live() {
  const live = useLoaded((caller) => caller(LIVE), [], LIVE_MS);
  const [samples, setSamples] = useState<Sample[]>([]);
  useEffect(() => {
    if (live.data) setSamples((before) => [...before, sampleOf(live.data!)].slice(-SAMPLES_MAX));
  }, [live.data]);
  return (
    <section aria-label={t.live}>
      <Show of={live} everyMs={LIVE_MS}>
        {(found) => (
          <>
            <LiveFigures {...found} />
            <div className="charts">
              <Lines
                label={t.requestsNow}
                samples={samples.map(({ at, values }) => ({
                  at,
                  values: values.slice(0, 2),
                }))}
                series={[t.running, t.waiting]}
                shown={(value) => String(Math.round(value))}
              />
              <Lines
                label={t.outputNow}
                samples={samples.map(({ at, values }) => ({
                  at,
                  values: values.slice(2),
                }))}
                series={[t.tokensPerSecond]}
                shown={(value) => (value ? rate(value) : "0")}
              />
            </div>
            <Organizations all={found.organizations ?? []} />
            <h2>{t.requests}</h2>
            <Requests found={found} reload={live.reload} />
            <AsOf />
            <Command>weir requests --watch</Command>
          </>
        )}
      </Show>
    </section>
  );
}

function waitingOf(requests: LiveRequestJson[] = []): number {
  return requests.filter((each) => WAITING.has(each.phase ?? "")).length;
}

function speedOf(organizations: LiveOrganizationJson[] = []): number {
  return organizations.reduce((total, each) => total + Number(each.tokensPerSecond ?? 0), 0);
}

function sampleOf({
  requests = [],
  organizations = [],
  requestCount,
}: ListLiveRequestsResponseJson): Sample {
  const waiting = waitingOf(requests);
  return {
    at: Date.now(),
    values: [Number(whole(requestCount)) - waiting, waiting, speedOf(organizations)],
  };
}

function LiveFigures({
  requests = [],
  organizations = [],
  requestCount,
  unresponsiveProcessIds = [],
}: ListLiveRequestsResponseJson) {
  const sum = (name: "holdCount" | "heldTokenCount") =>
    count(organizations.reduce((total, each) => total + whole(each[name]), 0n));
  const isAll = whole(requestCount) <= BigInt(requests.length);
  return (
    <>
      <Tiles>
        <Tile name={t.requests} value={count(requestCount)} />
        <Tile
          name={t.waiting}
          value={count(waitingOf(requests))}
          note={isAll ? "" : t.ofTheOldest(count(requests.length))}
        />
        <Tile name={t.output} value={rate(speedOf(organizations))} unit={t.tokensPerSecond} />
        <Tile name={t.holds} value={sum("holdCount")} />
        <Tile name={t.held} value={sum("heldTokenCount")} />
      </Tiles>
      {unresponsiveProcessIds.length > 0 && (
        <Remark kind="warning">{t.unresponsive(unresponsiveProcessIds.join(", "))}</Remark>
      )}
    </>
  );
}

function Organizations({ all }: { all: LiveOrganizationJson[] }) {
  if (all.length === 0) return null;
  return (
    <>
      <h2>{t.byOrganization}</h2>
      <Table
        caption={t.byOrganization}
        columns={[
          column<LiveOrganizationJson>(text.organization, (each) => (
            <a href={addressOf("limits", { org: each.name })}>{each.name}</a>
          )),
          column<LiveOrganizationJson>(t.requests, (each) => count(each.requestCount), true),
          column<LiveOrganizationJson>(t.holds, (each) => count(each.holdCount), true),
          column<LiveOrganizationJson>(t.held, (each) => count(each.heldTokenCount), true),
          column<LiveOrganizationJson>(
            t.tokensPerSecond,
            (each) => rate(each.tokensPerSecond),
            true,
          ),
        ]}
        rows={all}
        keyOf={(each) => each.organizationId}
      />
    </>
  );
}

function Requests({
  found: { requests = [], requestCount },
  reload,
}: {
  found: ListLiveRequestsResponseJson;
  reload: () => void;
}) {
  const view = useView();
  const columns = [
    column<LiveRequestJson>(text.request, (each) => (
      <a
        className="id"
        href={addressOf("requests", {
          id: each.requestId,
          project: `${each.organizationName}/${each.projectName}`,
        })}
      >
        {each.requestId}
      </a>
    )),
    column<LiveRequestJson>(text.project, (each) => (
      <>
        {each.organizationName}/{each.projectName}
        <Note>{t.key(each.apiKeyPrefix ?? "")}</Note>
      </>
    )),
    column<LiveRequestJson>(text.model, (each) => each.model),
    column<LiveRequestJson>(t.phase, (each) => (
      <Badge kind={WAITING.has(each.phase ?? "") ? "warning" : "good"}>
        {words(each.phase, "REQUEST_PHASE_") || t.unknown}
      </Badge>
    )),
    column<LiveRequestJson>(t.age, (each) => wait(secondsOf(each.age)), true),
    column<LiveRequestJson>(text.tokens.input, (each) => count(each.inputTokenCount), true),
    column<LiveRequestJson>(text.tokens.cached, (each) => count(each.cachedInputTokenCount), true),
    column<LiveRequestJson>(text.tokens.output, (each) => count(each.deliveredTokenCount), true),
    column<LiveRequestJson>(t.tokensPerSecond, (each) => rate(each.tokensPerSecond), true),
    ...(view.may("AdminService/KillRequest")
      ? [column<LiveRequestJson>(t.cancel, (each) => <Kill of={each} reload={reload} />)]
      : []),
  ];
  return (
    <>
      <Table
        caption={t.oldestFirst}
        columns={columns}
        rows={requests}
        empty={t.none}
        keyOf={(each) => `${each.projectId}/${each.requestId}`}
      />
      {whole(requestCount) > BigInt(requests.length) && (
        <Note>{t.oldest(count(requests.length), count(requestCount))}</Note>
      )}
    </>
  );
}

function Kill({ of: request, reload }: { of: LiveRequestJson; reload: () => void }) {
  const { requestId = "", model = "" } = request;
  const project = `${request.organizationName}/${request.projectName}`;
  return (
    <Action
      call="AdminService/KillRequest"
      label={t.end}
      about={requestId}
      title={t.endTitle}
      explanation={t.endExplanation(requestId, project, model)}
      act={t.endAct}
      fields={[{ name: "reason", label: t.endReason, help: t.endReasonHelp }]}
      isDanger
      request={({ reason = "" }) => ({ requestId, project, reason })}
      done={({ result = "RESULT_UNSPECIFIED" }) => t.ended(requestId, result)}
      changed={reload}
    />
  );
}

function Models() {
  const models = useLoaded((caller) => caller(MODELS), [], MODELS_MS);
  return (
    <section aria-label={t.models}>
      <h2>{t.models}</h2>
      <Show of={models} everyMs={MODELS_MS}>
        {({ models: all = [] }) => (
          <Table
            caption={t.yourModels}
            columns={[
              column<ModelJson>(text.model, (each) => each.name),
              column<ModelJson>(t.type, (each) => words(each.task, "MODEL_TASK_")),
              column<ModelJson>(t.engine, (each) => each.engine),
              column<ModelJson>(
                t.context,
                (each) => t.contextOf(count(each.contextWindowTokens)),
                true,
              ),
              column<ModelJson>(
                t.ready,
                (each) =>
                  t.readyOf(
                    each.readyReplicaCount ?? 0,
                    each.replicaCount ?? 0,
                    each.drainedReplicaCount ?? 0,
                  ),
                true,
              ),
              column<ModelJson>(t.price, priceOf, true),
            ]}
            rows={all}
            empty={t.noModels}
            keyOf={(each) => each.name}
          />
        )}
      </Show>
    </section>
  );
}

function priceOf({ price, task }: ModelJson): string {
  if (!price) return t.noPrice;
  if (task === "MODEL_TASK_EMBED")
    return `${perMillion(price.embeddingPicosPerToken)} ${price.currencyCode}`;
  const parts = [
    price.inputPicosPerToken,
    price.cachedInputPicosPerToken,
    price.outputPicosPerToken,
  ]
    .map(perMillion)
    .join(" / ");
  const thinking =
    price.reasoningPicosPerToken === price.outputPicosPerToken
      ? ""
      : ` ${t.thinking(perMillion(price.reasoningPicosPerToken))}`;
  return `${parts}${thinking} ${price.currencyCode}`;
}
