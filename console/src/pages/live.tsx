// Charts of the traffic of all api processes, by model, and the requests that run now.

import type {
  GetTrafficResponseJson,
  LatencyJson,
  ModelTrafficJson,
  TrafficPeriodJson,
} from "../gen/weir/v1/operation_pb.js";
import type {
  LiveOrganizationJson,
  LiveRequestJson,
  ListLiveRequestsResponseJson,
} from "../gen/weir/v1/live_requests_pb.js";
import { count, milliseconds, rate, secondsOf, share, wait, whole, words } from "../format.js";
import { Action } from "../parts/actions.js";
import { AsOf, Badge, Choice, Command, Note, Remark, Tile, Tiles } from "../parts/basics.js";
import { Lines } from "../parts/charts.js";
import type { Sample } from "../parts/charts.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const LIVE = "AdminService/ListLiveRequests";
const TRAFFIC = "AdminService/GetTraffic";
export const LIVE_MS = 5000;
// Periods by their word in the address, and how often their charts are loaded again.
const PERIODS: Record<string, { period: TrafficPeriodJson; title: string; everyMs: number }> = {
  "": { period: "TRAFFIC_PERIOD_QUARTER_HOUR", title: text.live.quarterHour, everyMs: 15_000 },
  hour: { period: "TRAFFIC_PERIOD_HOUR", title: text.live.hour, everyMs: 30_000 },
  day: { period: "TRAFFIC_PERIOD_DAY", title: text.live.day, everyMs: 60_000 },
};
const ALL = "*"; // of the choice of a model: no model has this name
const WAITING = new Set([
  "REQUEST_PHASE_PREPARING",
  "REQUEST_PHASE_QUEUED",
  "REQUEST_PHASE_LOADING",
]);
const t = text.live;
const o = text.overview;

export const live: Page = {
  id: "live",
  title: text.pages.live,
  calls: [TRAFFIC, LIVE],
  Show: () => (
    <>
      <Charts />
      <Running />
    </>
  ),
};

function Charts() {
  const view = useView();
  const asked = Object.hasOwn(PERIODS, view.asked("period")) ? view.asked("period") : "";
  const { period, everyMs } = PERIODS[asked]!;
  const found = useLoaded((caller) => caller(TRAFFIC, { period }), [period], everyMs);
  return (
    <section aria-label={t.charts}>
      <Show of={found} everyMs={everyMs}>
        {(traffic) => {
          const models = traffic.models ?? [];
          const name = view.asked("model") || ALL;
          const chosen = models.find((each) => (each.model ?? "") === name) ?? traffic.total ?? {};
          return (
            <>
              <div className="controls">
                <Choice
                  name={t.period}
                  options={Object.entries(PERIODS).map(([value, { title }]) => [value, title])}
                  value={asked}
                  onChange={(next) => view.go({ period: next })}
                />
                <Choice
                  name={text.model}
                  options={[
                    [ALL, t.allModels],
                    ...models.map(({ model = "" }): [string, string] => [model, nameOf(model)]),
                  ]}
                  value={chosen === traffic.total ? ALL : name}
                  onChange={(next) => view.go({ model: next === ALL ? "" : next })}
                />
              </div>
              <TrafficCharts of={chosen} traffic={traffic} />
              <Note>{t.explanation}</Note>
              <ByModel traffic={traffic} />
              <Errors of={chosen} />
            </>
          );
        }}
      </Show>
    </section>
  );
}

export function nameOf(model: string | undefined): string {
  return model || t.unknownModel;
}

// Steps of a report as samples of a chart, at their ends.
export function samplesOf(
  { startTime = "", step, stepCount = 0 }: GetTrafficResponseJson,
  valuesOf: (index: number, seconds: number) => (number | null)[],
): Sample[] {
  const seconds = secondsOf(step) ?? 1;
  return Array.from({ length: stepCount }, (_, index) => ({
    at: Date.parse(startTime) + (index + 1) * seconds * 1000,
    values: valuesOf(index, seconds),
  }));
}

export function spanOf({ step, stepCount = 0 }: GetTrafficResponseJson): number {
  return (secondsOf(step) ?? 1) * stepCount;
}

// Percentiles of a step; none where nothing was measured.
function latencyOf(of: LatencyJson | undefined, index: number): (number | null)[] {
  return [of?.p50Ms, of?.p99Ms].map((each) => Number(each?.[index] ?? 0) || null);
}

function cacheShare(cached: string | undefined, computed: string | undefined): number | null {
  const all = whole(cached) + whole(computed);
  return all > 0n ? share(whole(cached), all) * 100 : null;
}

const number = (value: number) => (value < 10 ? value.toFixed(1) : count(Math.round(value)));
const time = (value: number) => (value < 1000 ? milliseconds(value) : `${number(value / 1000)} s`);

function TrafficCharts({ of, traffic }: { of: ModelTrafficJson; traffic: GetTrafficResponseJson }) {
  const perSecond = (counts: string[] | undefined, index: number, seconds: number) =>
    Number(whole(counts?.[index])) / seconds;
  const charts: [string, string[], (value: number) => string, Parameters<typeof samplesOf>[1]][] = [
    [
      t.requestsPerMinute,
      [t.all, t.errors],
      number,
      (index, seconds) =>
        [of.requestCounts, of.errorCounts].map((each) => perSecond(each, index, seconds) * 60),
    ],
    [
      t.tokensPerSecond,
      [text.tokens.output, text.tokens.input, text.tokens.cached],
      number,
      (index, seconds) =>
        [of.outputTokenCounts, of.inputTokenCounts, of.cachedInputTokenCounts].map((each) =>
          perSecond(each, index, seconds),
        ),
    ],
    [t.firstToken, [t.p50, t.p99], time, (index) => latencyOf(of.firstToken, index)],
    [t.interToken, [t.p50, t.p99], time, (index) => latencyOf(of.interToken, index)],
    [
      t.queue,
      [o.running, o.waiting],
      number,
      (index) => [of.runningCounts, of.waitingCounts].map((each) => Number(each?.[index] ?? 0)),
    ],
    [
      t.cacheHits,
      [t.ofPrompts],
      (value) => `${Math.round(value)} %`,
      (index) => [cacheShare(of.cachedInputTokenCounts?.[index], of.inputTokenCounts?.[index])],
    ],
  ];
  return (
    <div className="charts">
      {charts.map(([label, series, shown, valuesOf]) => (
        <Lines
          key={label}
          label={label}
          samples={samplesOf(traffic, valuesOf)}
          series={series}
          shown={shown}
          spanS={spanOf(traffic)}
        />
      ))}
    </div>
  );
}

export function sumOfSteps(counts: string[] | undefined): bigint {
  return (counts ?? []).reduce((sum, each) => sum + whole(each), 0n);
}

function percentiles(of: LatencyJson | undefined): string {
  const { periodP50Ms, periodP99Ms } = of ?? {};
  return periodP99Ms ? `${milliseconds(periodP50Ms)} / ${milliseconds(periodP99Ms)}` : text.none;
}

// Columns of the traffic of a model in the whole period.
export const trafficColumns = [
  column<ModelTrafficJson>(o.requests, (each) => count(sumOfSteps(each.requestCounts)), true),
  column<ModelTrafficJson>(t.errors, (each) => count(sumOfSteps(each.errorCounts)), true),
  column<ModelTrafficJson>(
    text.tokens.output,
    (each) => count(sumOfSteps(each.outputTokenCounts)),
    true,
  ),
  column<ModelTrafficJson>(t.firstTokenPercentiles, (each) => percentiles(each.firstToken), true),
  column<ModelTrafficJson>(t.interTokenPercentiles, (each) => percentiles(each.interToken), true),
];

function ByModel({ traffic: { models = [], total } }: { traffic: GetTrafficResponseJson }) {
  return (
    <>
      <h2>{t.byModel}</h2>
      <Table
        caption={t.byModel}
        columns={[
          column<ModelTrafficJson>(text.model, (each) =>
            each === total ? t.allModels : nameOf(each.model),
          ),
          ...trafficColumns,
          column<ModelTrafficJson>(
            t.cacheHits,
            ({ cachedInputTokenCounts, inputTokenCounts }) => {
              const cached = sumOfSteps(cachedInputTokenCounts);
              const hits = cacheShare(String(cached), String(sumOfSteps(inputTokenCounts)));
              return hits === null ? text.none : `${hits.toFixed(1)} %`;
            },
            true,
          ),
        ]}
        rows={models}
        foot={models.length > 0 ? (total ?? null) : null}
        empty={t.noTraffic}
        keyOf={(each) => each.model}
      />
    </>
  );
}

function Errors({ of: { errors = [] } }: { of: ModelTrafficJson }) {
  if (errors.length === 0) return null;
  return (
    <>
      <h2>{t.errorsByReason}</h2>
      <Table
        caption={t.errorsByReason}
        columns={[
          column<NonNullable<ModelTrafficJson["errors"]>[number]>(t.reason, (each) => each.reason),
          column<NonNullable<ModelTrafficJson["errors"]>[number]>(
            o.requests,
            (each) => count(each.count),
            true,
          ),
        ]}
        rows={errors}
        keyOf={(each) => each.reason}
      />
    </>
  );
}

function Running() {
  const view = useView();
  const found = useLoaded((caller) => caller(LIVE), [], LIVE_MS);
  if (!view.may(LIVE)) return null;
  return (
    <section aria-label={o.live}>
      <h2>{o.requests}</h2>
      <Show of={found} everyMs={LIVE_MS}>
        {(running) => (
          <>
            <LiveFigures {...running} />
            <Organizations all={running.organizations ?? []} />
            <Requests found={running} reload={found.reload} />
            <AsOf />
            <Command>weir requests --watch</Command>
          </>
        )}
      </Show>
    </section>
  );
}

export function waitingOf(requests: LiveRequestJson[] = []): number {
  return requests.filter((each) => WAITING.has(each.phase ?? "")).length;
}

export function speedOf(organizations: LiveOrganizationJson[] = []): number {
  return organizations.reduce((total, each) => total + Number(each.tokensPerSecond ?? 0), 0);
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
        <Tile name={o.requests} value={count(requestCount)} />
        <Tile
          name={o.waiting}
          value={count(waitingOf(requests))}
          note={isAll ? "" : o.ofTheOldest(count(requests.length))}
        />
        <Tile name={o.output} value={rate(speedOf(organizations))} unit={o.tokensPerSecond} />
        <Tile name={o.holds} value={sum("holdCount")} />
        <Tile name={o.held} value={sum("heldTokenCount")} />
      </Tiles>
      {unresponsiveProcessIds.length > 0 && (
        <Remark kind="warning">{o.unresponsive(unresponsiveProcessIds.join(", "))}</Remark>
      )}
    </>
  );
}

// Organizations with running requests, those with most tokens per second first.
export function Organizations({ all }: { all: LiveOrganizationJson[] }) {
  if (all.length === 0) return null;
  return (
    <>
      <h2>{o.byOrganization}</h2>
      <Table
        caption={o.byOrganization}
        columns={[
          column<LiveOrganizationJson>(text.organization, (each) => (
            <a href={addressOf("limits", { org: each.name })}>{each.name}</a>
          )),
          column<LiveOrganizationJson>(o.requests, (each) => count(each.requestCount), true),
          column<LiveOrganizationJson>(o.holds, (each) => count(each.holdCount), true),
          column<LiveOrganizationJson>(o.held, (each) => count(each.heldTokenCount), true),
          column<LiveOrganizationJson>(
            o.tokensPerSecond,
            (each) => rate(each.tokensPerSecond),
            true,
          ),
        ]}
        rows={[...all].sort(
          (one, other) =>
            Number(other.tokensPerSecond ?? 0) - Number(one.tokensPerSecond ?? 0) ||
            Number(whole(other.requestCount) - whole(one.requestCount)),
        )}
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
        <Note>{o.key(each.apiKeyPrefix ?? "")}</Note>
      </>
    )),
    column<LiveRequestJson>(text.model, (each) => each.model),
    column<LiveRequestJson>(o.phase, (each) => (
      <Badge kind={WAITING.has(each.phase ?? "") ? "warning" : "good"}>
        {words(each.phase, "REQUEST_PHASE_") || o.unknown}
      </Badge>
    )),
    column<LiveRequestJson>(o.age, (each) => wait(secondsOf(each.age)), true),
    column<LiveRequestJson>(text.tokens.input, (each) => count(each.inputTokenCount), true),
    column<LiveRequestJson>(text.tokens.cached, (each) => count(each.cachedInputTokenCount), true),
    column<LiveRequestJson>(text.tokens.output, (each) => count(each.deliveredTokenCount), true),
    column<LiveRequestJson>(o.tokensPerSecond, (each) => rate(each.tokensPerSecond), true),
    ...(view.may("AdminService/KillRequest")
      ? [column<LiveRequestJson>(o.cancel, (each) => <Kill of={each} reload={reload} />)]
      : []),
  ];
  return (
    <>
      <Table
        caption={o.oldestFirst}
        columns={columns}
        rows={requests}
        empty={o.none}
        keyOf={(each) => `${each.projectId}/${each.requestId}`}
      />
      {whole(requestCount) > BigInt(requests.length) && (
        <Note>{o.oldest(count(requests.length), count(requestCount))}</Note>
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
      label={o.end}
      about={requestId}
      title={o.endTitle}
      explanation={o.endExplanation(requestId, project, model)}
      act={o.endAct}
      fields={[{ name: "reason", label: o.endReason, help: o.endReasonHelp }]}
      isDanger
      request={({ reason = "" }) => ({ requestId, project, reason })}
      done={({ result = "RESULT_UNSPECIFIED" }) => o.ended(requestId, result)}
      changed={reload}
    />
  );
}
