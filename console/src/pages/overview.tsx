// First page: what an operator, or a customer, must know now. Each figure comes from a call of its
// own, so that one that fails leaves the others.

import type { ApiKeyJson } from "../gen/weir/v1/admin_service_pb.js";
import type { AlertJson } from "../gen/weir/v1/alerts_pb.js";
import type { ModelJson } from "../gen/weir/v1/inference_service_pb.js";
import type { ListLiveRequestsResponseJson } from "../gen/weir/v1/live_requests_pb.js";
import type {
  ConcernJson,
  ConcernKindJson,
  GetTrafficResponseJson,
  ListConcernsResponseJson,
  ModelTrafficJson,
} from "../gen/weir/v1/operation_pb.js";
import type { ListReplicasResponseJson, ReplicaJson } from "../gen/weir/v1/replicas_pb.js";
import type { QuotaStatusJson } from "../gen/weir/v1/types_pb.js";
import type { GetForecastResponseJson, UsageRowJson } from "../gen/weir/v1/usage_reports_pb.js";
import {
  brief,
  count,
  dayOf,
  milliseconds,
  minorDigits,
  money,
  monthOf,
  decimal,
  perMillion,
  PICOS,
  picosOf,
  rate,
  secondsOf,
  share,
  wait,
  whole,
  words,
} from "../format.js";
import {
  AsOf,
  Badge,
  Command,
  Name,
  Note,
  Problem,
  Remark,
  Tile,
  Tiles,
  Time,
} from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { Lines } from "../parts/charts.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import type { Chosen } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, tried, useLoaded, useView } from "../view.js";
import type { Caller, Page, Tried, View } from "../view.js";
import { limitColumns } from "./limits.js";
import {
  LIVE_MS,
  Organizations,
  nameOf,
  samplesOf,
  spanOf,
  speedOf,
  sumOfSteps,
  trafficColumns,
  waitingOf,
} from "./live.js";
import { summed } from "./usage.js";

const TRAFFIC_MS = 15_000;
const CUSTOMER_MS = 60_000;
const MODELS_MS = 10_000;
const LIVE = "AdminService/ListLiveRequests";
const TRAFFIC = "AdminService/GetTraffic";
const MODELS = "InferenceService/ListModels";
const USAGE = "BillingService/GetUsage";
const OWN_USAGE = "InferenceService/GetOwnUsage";
const LIMITS = "AdminService/ListQuotas";
const OWN_LIMITS = "InferenceService/GetQuota";
const KEYS = "AdminService/ListApiKeys";
const ALERTS = "BillingService/ListAlerts";
const FORECAST = "BillingService/GetForecast";
const SHOWN_MAX = 5; // alerts, limits, requests
const DAY_MS = 86_400_000;
const EXPIRING_MS = 14 * DAY_MS;
const ERROR_DAYS = 7;
const BROKEN = new Set([
  "REPLICA_STATE_FAILED",
  "REPLICA_STATE_TRIPPED",
  "REPLICA_STATE_RESTARTING",
]);
// A cold replica starts when a request needs it.
const AVAILABLE = new Set(["REPLICA_STATE_READY", "REPLICA_STATE_COLD", "REPLICA_STATE_LOADING"]);
const t = text.overview;

export const overview: Page = {
  id: "overview",
  title: text.pages.overview,
  calls: [LIVE, MODELS, USAGE, OWN_USAGE],
  Show: Overview,
};

function Overview() {
  const view = useView();
  return (
    <>
      {view.may(TRAFFIC) ? <Operator /> : <Customer />}
      {view.may(MODELS) && <Models />}
    </>
  );
}

// The present state of all processes, every few seconds; traffic and concerns less often.
function Operator() {
  const now = useLoaded(
    async (caller) => ({
      live: await tried(caller(LIVE, { pageSize: SHOWN_MAX })),
      replicas: await tried(caller("AdminService/ListReplicas")),
    }),
    [],
    LIVE_MS,
  );
  const lately = useLoaded(
    async (caller) => {
      const [traffic, concerns, alerts] = await Promise.all([
        tried(caller(TRAFFIC, { period: "TRAFFIC_PERIOD_QUARTER_HOUR" })),
        tried(caller("AdminService/ListConcerns")),
        tried(caller(ALERTS, { pageSize: SHOWN_MAX })),
      ]);
      return { traffic, concerns, alerts };
    },
    [],
    TRAFFIC_MS,
  );
  return (
    <Show of={now} everyMs={LIVE_MS}>
      {({ live, replicas }) => (
        <Show of={lately} everyMs={TRAFFIC_MS}>
          {({ traffic, concerns, alerts }) => (
            <>
              <Failures of={[live, replicas, traffic, concerns, alerts]} />
              <Health
                live={valueOf(live)}
                replicas={valueOf(replicas)}
                traffic={valueOf(traffic)}
              />
              <Attention concerns={valueOf(concerns)} replicas={valueOf(replicas)} />
              <Organizations all={valueOf(live).organizations ?? []} />
              <Trend of={valueOf(traffic)} />
              <ModelHealth traffic={valueOf(traffic)} replicas={valueOf(replicas)} />
              <Alerts all={valueOf(alerts).alerts ?? []} />
              <AsOf />
              <Command>weir requests --watch</Command>
            </>
          )}
        </Show>
      )}
    </Show>
  );
}

function valueOf<Data extends object>(of: Tried<Data>): Partial<Data> {
  return "value" in of ? of.value : {};
}

// Errors of the calls that failed, each once.
function Failures({ of }: { of: (Tried<unknown> | null)[] }) {
  const errors = of.flatMap((each) => (each && "error" in each ? [each.error] : []));
  const said = new Map(errors.map((each) => [String(each), each]));
  return [...said].map(([message, each]) => <Problem key={message} of={each} />);
}

function Health({
  live,
  replicas: { replicas = [], unresponsiveProcessIds = [] },
  traffic,
}: {
  live: Partial<ListLiveRequestsResponseJson>;
  replicas: Partial<ListReplicasResponseJson>;
  traffic: Partial<GetTrafficResponseJson>;
}) {
  const gateways = new Set(replicas.map((each) => each.processId)).size;
  const silent = unresponsiveProcessIds.length;
  const models = new Map<string, boolean>();
  for (const { model = "", state, drained } of replicas)
    models.set(model, models.get(model) || (AVAILABLE.has(state ?? "") && !drained));
  const ready = [...models.values()].filter(Boolean).length;
  const { requestCounts, errorCounts, firstToken } = traffic.total ?? {};
  const [ended, errors] = [sumOfSteps(requestCounts), sumOfSteps(errorCounts)];
  const waiting = waitingOf(live.requests);
  return (
    <>
      <Tiles>
        <Tile
          name={t.gateways}
          value={count(gateways)}
          unit={t.answering}
          note={silent ? t.silent(count(silent)) : ""}
        />
        <Tile name={t.modelsReady} value={t.readyModels(ready, models.size)} />
        <Tile
          name={t.requests}
          value={count(whole(live.requestCount))}
          unit={t.now}
          note={waiting ? t.waitingOf(count(waiting)) : ""}
        />
        <Tile name={t.output} value={rate(speedOf(live.organizations))} unit={t.tokensPerSecond} />
        <Tile
          name={t.ttft}
          value={firstToken?.periodP99Ms ? milliseconds(firstToken.periodP50Ms) : text.none}
          note={firstToken?.periodP99Ms ? t.ttftNote(milliseconds(firstToken.periodP99Ms)) : ""}
        />
        <Tile
          name={t.errors}
          value={count(errors)}
          note={t.ofRequests(count(ended), percent(errors, ended))}
        />
      </Tiles>
      {silent > 0 && (
        <Remark kind="warning">{t.unresponsive(unresponsiveProcessIds.join(", "))}</Remark>
      )}
    </>
  );
}

function percent(part: bigint, of: bigint): string {
  return (share(part, of) * 100).toFixed(1);
}

// A page for each kind of concern, where it can be looked into.
const PAGE_OF: Partial<Record<ConcernKindJson, string>> = {
  CONCERN_KIND_USAGE_UNBILLED: "reconciliation",
  CONCERN_KIND_EXPORT_LATE: "reconciliation",
  CONCERN_KIND_WEBHOOK_FAILING: "alerts",
  CONCERN_KIND_MONTH_OPEN: "month",
  CONCERN_KIND_ADJUSTMENT_WAITING: "month",
  CONCERN_KIND_HOLDS_OVERDUE: "live",
};

function addressOfConcern({ kind, organizationName: org = "", subject = "" }: ConcernJson): string {
  const page = PAGE_OF[kind ?? "CONCERN_KIND_UNSPECIFIED"];
  const month = kind === "CONCERN_KIND_MONTH_OPEN" ? subject : "";
  return page ? addressOf(page, { org, month }) : "";
}

function Attention({
  concerns: { concerns = [] },
  replicas: { replicas = [], drains = [] },
}: {
  concerns: Partial<ListConcernsResponseJson>;
  replicas: Partial<ListReplicasResponseJson>;
}) {
  const broken = replicas.filter((each) => BROKEN.has(each.state ?? ""));
  const all: [string, Kind, string, string][] = [
    ...concerns.map((each): [string, Kind, string, string] => [
      t.concern(
        each.kind ?? "",
        each.organizationName ?? "",
        each.subject ?? "",
        count(each.count),
        each.age ? wait(secondsOf(each.age)) : "",
      ),
      /MISSING|UNBILLED|OVERDUE/.test(each.kind ?? "") ? "bad" : "warning",
      each.detail ?? "",
      addressOfConcern(each),
    ]),
    ...broken.map((each): [string, Kind, string, string] => [
      t.brokenReplica(each.replica ?? "", each.model ?? "", words(each.state, "REPLICA_STATE_")),
      each.state === "REPLICA_STATE_FAILED" ? "bad" : "warning",
      each.reason ?? "",
      addressOf("fleet", {}),
    ]),
    ...drains.map((each): [string, Kind, string, string] => [
      t.drainedReplica(each.replica ?? "", each.model ?? ""),
      "",
      each.reason ?? "",
      addressOf("fleet", {}),
    ]),
  ];
  return (
    <section aria-label={t.attention}>
      <h2>{t.attention}</h2>
      {all.length === 0 ? (
        <Remark kind="good">{t.noConcerns}</Remark>
      ) : (
        <ul className="concerns">
          {all.map(([said, kind, detail, address], index) => (
            <li key={index} className={`remark ${kind}`}>
              {address ? <a href={address}>{said}</a> : said}
              {detail && <Note>{detail}</Note>}
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

// Requests and time to the first token in the last quarter of an hour.
function Trend({ of: traffic }: { of: Partial<GetTrafficResponseJson> }) {
  if (!traffic.startTime) return null;
  const { requestCounts, errorCounts, firstToken } = traffic.total ?? {};
  const latency = (all: typeof firstToken, index: number) =>
    [all?.p50Ms, all?.p99Ms].map((each) => Number(each?.[index] ?? 0) || null);
  return (
    <section aria-label={t.lately}>
      <h2>
        {t.lately} <a href={addressOf("live", {})}>{t.allCharts}</a>
      </h2>
      <div className="charts">
        <Lines
          label={text.live.requestsPerMinute}
          samples={samplesOf(traffic, (index, seconds) =>
            [requestCounts, errorCounts].map(
              (each) => (Number(whole(each?.[index])) * 60) / seconds,
            ),
          )}
          series={[text.live.all, text.live.errors]}
          shown={(value) => String(Math.round(value))}
          spanS={spanOf(traffic)}
        />
        <Lines
          label={text.live.firstToken}
          samples={samplesOf(traffic, (index) => latency(firstToken, index))}
          series={[text.live.p50, text.live.p99]}
          shown={(value) => milliseconds(value)}
          spanS={spanOf(traffic)}
        />
      </div>
    </section>
  );
}

interface Served {
  model: string;
  replicas: ReplicaJson[];
  traffic: ModelTrafficJson;
}

function ModelHealth({
  traffic: { models = [] },
  replicas: { replicas = [] },
}: {
  traffic: Partial<GetTrafficResponseJson>;
  replicas: Partial<ListReplicasResponseJson>;
}) {
  const names = new Set([
    ...replicas.map((each) => (each.model ?? "").replace(/@.*/, "")),
    ...models.map((each) => each.model ?? ""),
  ]);
  const rows = [...names].sort().map((model): Served => ({
    model,
    replicas: replicas.filter((each) => (each.model ?? "").replace(/@.*/, "") === model),
    traffic: models.find((each) => (each.model ?? "") === model) ?? {},
  }));
  return (
    <>
      <h2>{t.modelHealth}</h2>
      <Table
        caption={t.modelHealth}
        columns={[
          column<Served>(text.model, ({ model }) => (
            <a href={addressOf("live", { model })}>{nameOf(model)}</a>
          )),
          column<Served>(
            t.ready,
            (each) => {
              const ready = each.replicas.filter(({ state }) => state === "REPLICA_STATE_READY");
              const isUsable = each.replicas.some(({ state }) => AVAILABLE.has(state ?? ""));
              return each.replicas.length > 0 ? (
                <Badge kind={ready.length > 0 ? "good" : isUsable ? "" : "bad"}>
                  {t.readyModels(ready.length, each.replicas.length)}
                </Badge>
              ) : (
                text.none
              );
            },
            true,
          ),
          ...trafficColumns.map((each) =>
            column<Served>(each.head, ({ traffic }) => each.cell(traffic), each.isNumber),
          ),
        ]}
        rows={rows}
        empty={text.live.noTraffic}
        keyOf={(each) => each.model}
      />
    </>
  );
}

function Alerts({ all }: { all: AlertJson[] }) {
  const view = useView();
  if (!view.may(ALERTS)) return null;
  return (
    <>
      <h2>{t.alerts}</h2>
      <Table
        caption={t.alerts}
        columns={[
          column<AlertJson>(t.when, (each) => <Time of={each.fireTime} />),
          column<AlertJson>(text.organization, (each) => (
            <a href={addressOf("alerts", { org: each.organizationName })}>
              {each.organizationName}
            </a>
          )),
          column<AlertJson>(t.what, (each) => (
            <>
              {words(each.kind)} <Name of={each.subjectName} />
            </>
          )),
          column<AlertJson>(
            t.threshold,
            (each) => (each.kind === "quota" ? `${count(each.threshold)} %` : ""),
            true,
          ),
        ]}
        rows={all}
        empty={t.noAlerts}
        keyOf={(each) => each.alertId}
      />
    </>
  );
}

interface Bought {
  chosen: Chosen;
  usage: Tried<{ rows?: UsageRowJson[]; total?: UsageRowJson }>;
  forecast: Tried<GetForecastResponseJson> | null;
  limits: Tried<{ quotas?: QuotaStatusJson[] }> | null;
  keys: Tried<{ apiKeys?: ApiKeyJson[] }> | null;
  alerts: Tried<{ alerts?: AlertJson[] }> | null;
}

async function bought(caller: Caller, view: View): Promise<Bought> {
  const chosen = await organizationOf(caller, view);
  const organization = chosen.ref;
  const month = monthOf(new Date());
  const groupBy = ["USAGE_GROUPING_DAY" as const];
  const may = <Data,>(name: Parameters<View["may"]>[0], made: () => Promise<Data>) =>
    view.may(name) ? tried(made()) : Promise.resolve(null);
  const [usage, forecast, limits, keys, alerts] = await Promise.all([
    tried(
      view.may(USAGE)
        ? caller(USAGE, { organization, month, groupBy })
        : caller(OWN_USAGE, { month, groupBy }),
    ),
    may(FORECAST, () => caller(FORECAST, { organization, month })),
    view.may(LIMITS)
      ? tried(caller(LIMITS, { organization }))
      : may(OWN_LIMITS, () => caller(OWN_LIMITS)),
    may(KEYS, () => caller(KEYS, { organization })),
    may(ALERTS, () => caller(ALERTS, { organization, pageSize: SHOWN_MAX })),
  ]);
  return { chosen, usage, forecast, limits, keys, alerts };
}

function Customer() {
  const view = useView();
  const found = useLoaded((caller) => bought(caller, view), [], CUSTOMER_MS);
  return (
    <Show of={found} everyMs={CUSTOMER_MS}>
      {({ chosen, usage, forecast, limits, keys, alerts }) => {
        const rows = valueOf(usage).rows ?? [];
        const all = summed(rows);
        const expiring = expiringKeys(valueOf(keys ?? { value: {} }).apiKeys ?? []);
        return (
          <>
            <div className="controls">
              <OrganizationChoice of={chosen} />
            </div>
            <Failures of={[usage, forecast, limits, keys, alerts]} />
            {"value" in usage && all.requestCount === 0n && <FirstSteps keys={keys} />}
            <Spent of={forecast} rows={rows} currency={chosen.currency} />
            <Tightest of={limits} currency={chosen.currency} />
            <Expiring keys={expiring} />
            <Failed rows={rows} />
            {alerts && <Alerts all={valueOf(alerts).alerts ?? []} />}
            <AsOf />
          </>
        );
      }}
    </Show>
  );
}

// What to do before the first request of the month.
function FirstSteps({ keys }: { keys: Bought["keys"] }) {
  const view = useView();
  const hasKey =
    keys !== null &&
    (valueOf(keys).apiKeys ?? []).some((each) => !each.revokeTime && !each.isBound);
  const steps: [string, string, boolean][] = [
    [t.stepKey, view.may("AdminService/CreateApiKey") ? addressOf("keys", {}) : "", hasKey],
    [t.stepTry, view.may(MODELS) ? addressOf("playground", {}) : "", false],
    [t.stepCode, view.may(MODELS) ? addressOf("playground", {}) : "", false],
    [t.stepLimit, view.may("AdminService/SetQuota") ? addressOf("limits", {}) : "", false],
  ];
  return (
    <section aria-label={t.firstSteps}>
      <h2>{t.firstSteps}</h2>
      <ol className="steps">
        {steps.map(([said, address, isDone]) => (
          <li key={said}>
            {address ? <a href={address}>{said}</a> : said}{" "}
            {isDone && <Badge kind="good">{t.done}</Badge>}
          </li>
        ))}
      </ol>
    </section>
  );
}

// Cost of the month so far, and its forecast with the band.
function Spent({
  of,
  rows,
  currency,
}: {
  of: Bought["forecast"];
  rows: UsageRowJson[];
  currency: string;
}) {
  const all = summed(rows);
  const {
    expected,
    low,
    high,
    confidencePercent = 0,
    warnings = [],
  } = valueOf(of ?? { value: {} });
  const today = summed(rows.filter((each) => each.day === dayOf(Date.now())));
  return (
    <>
      <Tiles>
        <Tile
          name={t.spent}
          value={brief(all.cost, currency)}
          unit={currency}
          note={text.usage.beforePlan}
        />
        {expected && (
          <Tile
            name={t.forecast}
            value={brief(picosOf(expected), currency)}
            unit={currency}
            note={low && high ? t.band(money(low), money(high), confidencePercent) : ""}
          />
        )}
        <Tile name={t.today} value={brief(today.cost, currency)} unit={currency} />
        <Tile name={t.requestsOfMonth} value={count(all.requestCount)} />
        <Tile name={t.outputOfMonth} value={count(all.outputTokenCount)} unit={text.tokens.unit} />
      </Tiles>
      {of && !expected && all.requestCount > 0n && <Note>{text.usage.noForecast}</Note>}
      {warnings.length > 0 && <Note>{warnings.join(" ")}</Note>}
      {all.pending > 0n && (
        <Note>
          {text.usage.pending(`${decimal(all.pending, PICOS, minorDigits(currency))} ${currency}`)}
        </Note>
      )}
    </>
  );
}

// Limits of which the largest share is used or held.
export function tightest(quotas: QuotaStatusJson[]): QuotaStatusJson[] {
  const used = (each: QuotaStatusJson) =>
    share(whole(each.usedValue) + whole(each.heldValue), each.limitValue);
  return [...quotas].sort((one, other) => used(other) - used(one)).slice(0, SHOWN_MAX);
}

function Tightest({ of, currency }: { of: Bought["limits"]; currency: string }) {
  if (of === null) return null;
  const { quotas = [] } = valueOf(of);
  return (
    <>
      <h2>
        {t.limits} <a href={addressOf("limits", {})}>{t.allLimits(count(quotas.length))}</a>
      </h2>
      <Table
        caption={t.limits}
        columns={limitColumns(currency)}
        rows={tightest(quotas)}
        empty={text.limits.none}
        keyOf={(each) => each.quotaId}
      />
    </>
  );
}

// Valid keys that expire soon, the next one first.
export function expiringKeys(keys: ApiKeyJson[], now = Date.now()): ApiKeyJson[] {
  const at = (each: ApiKeyJson) => Date.parse(each.expireTime ?? "");
  return keys
    .filter((each) => !each.revokeTime && at(each) > now && at(each) < now + EXPIRING_MS)
    .sort((one, other) => at(one) - at(other));
}

function Expiring({ keys }: { keys: ApiKeyJson[] }) {
  if (keys.length === 0) return null;
  return (
    <>
      <h2>{t.expiring}</h2>
      <Table
        caption={t.expiring}
        columns={[
          column<ApiKeyJson>(text.apiKey, (each) => (
            <a href={addressOf("keys", {})}>
              <Name of={each.name} /> <span className="id">{each.prefix}</span>
            </a>
          )),
          column<ApiKeyJson>(text.project, (each) => each.projectName),
          column<ApiKeyJson>(t.expires, (each) => <Time of={each.expireTime} />),
        ]}
        rows={keys}
        keyOf={(each) => each.apiKeyId}
      />
    </>
  );
}

// Requests of the last days that were limited or have failed, by day.
function Failed({ rows }: { rows: UsageRowJson[] }) {
  const days = [...rows]
    .filter((each) => (each.day ?? "") > dayOf(Date.now(), ERROR_DAYS))
    .filter((each) => whole(each.failed?.requestCount) + whole(each.limited?.requestCount) > 0n)
    .sort((one, other) => ((one.day ?? "") < (other.day ?? "") ? 1 : -1));
  if (days.length === 0) return null;
  return (
    <>
      <h2>{t.failures}</h2>
      <Table
        caption={t.failures}
        columns={[
          column<UsageRowJson>(text.usage.dayUtc, (each) => (
            <a href={addressOf("requests", { day: each.day })}>{each.day}</a>
          )),
          column<UsageRowJson>(t.requests, (each) => count(each.requestCount), true),
          column<UsageRowJson>(text.usage.failed, (each) => count(each.failed?.requestCount), true),
          column<UsageRowJson>(
            text.usage.limited,
            (each) => count(each.limited?.requestCount),
            true,
          ),
        ]}
        rows={days}
        keyOf={(each) => each.day}
      />
      <Note>{t.failuresNote}</Note>
    </>
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
