// Usage of a month or of days: by day as stacked bars and table, by model, and by end user, label,
// hour, project or key. A key that may not read the organization's usage sees its own.

import type {
  GetForecastResponseJson,
  GetOwnUsageResponseJson,
  GetUsageRequestJson,
  UsageGroupingJson,
  UsageRowJson,
} from "../gen/weir/v1/usage_reports_pb.js";
import {
  PICOS,
  brief,
  count,
  dayOf,
  daysBetween,
  daysOf,
  decimal,
  minorDigits,
  money,
  monthOf,
  picosOf,
  places,
  plain,
  quoted,
  whole,
} from "../format.js";
import {
  Choice,
  Command,
  Name,
  Note,
  Pages,
  Problem,
  Remark,
  Search,
  Tile,
  Tiles,
} from "../parts/basics.js";
import { Bars, SERIES_MAX } from "../parts/charts.js";
import { OrganizationChoice, monthChosen, organizationOf } from "../parts/choices.js";
import type { Chosen } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import type { Column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, tried, useLoaded, useView } from "../view.js";
import type { Caller, Page, Tried, View } from "../view.js";

const USAGE = "BillingService/GetUsage";
const OWN = "InferenceService/GetOwnUsage";
const ROWS_MAX = 10_000;
const OWN_MONTHS = 4; // months that a key can choose for its own usage
const PAGE_SIZE = 100; // rows of one grouping
const GROUP_BY: UsageGroupingJson[] = ["USAGE_GROUPING_DAY", "USAGE_GROUPING_MODEL"];
const t = text.usage;
const RANGES: [string, string][] = [
  ["7", t.lastDays(7)],
  ["30", t.lastDays(30)],
  ["90", t.lastDays(90)],
  ["days", t.otherDays],
];

// Groupings that can be chosen, with the word of the terminal.
interface Grouping {
  title: string;
  grouping: UsageGroupingJson;
  nameOf: (row: UsageRowJson) => string;
  word: string;
}
const GROUPINGS: Record<string, Grouping> = {
  end_user: {
    title: t.endUser,
    grouping: "USAGE_GROUPING_END_USER",
    nameOf: (row) => row.endUser || (row.endUserId ? t.erased(row.endUserId) : t.notGiven),
    word: "end-user",
  },
  label: {
    title: t.label,
    grouping: "USAGE_GROUPING_LABEL",
    nameOf: (row) => row.labelValue ?? t.notGiven,
    word: "label:",
  },
  hour: {
    title: t.hour,
    grouping: "USAGE_GROUPING_HOUR",
    nameOf: (row) => (row.hour ?? "").replace("T", " ").replace("Z", ""),
    word: "hour",
  },
  project: {
    title: text.project,
    grouping: "USAGE_GROUPING_PROJECT",
    nameOf: (row) => row.projectName ?? "",
    word: "project",
  },
  key: {
    title: text.apiKey,
    grouping: "USAGE_GROUPING_API_KEY",
    nameOf: (row) => `${row.apiKeyName} (${row.apiKeyPrefix})`,
    word: "key",
  },
};

const COUNTS = [
  "requestCount",
  "inputTokenCount",
  "cachedInputTokenCount",
  "outputTokenCount",
  "reasoningTokenCount",
  "embeddingTokenCount",
] as const;
const ENDS = ["cancelled", "limited", "failed"] as const;

// Sums of rows, exact: amounts are in picos.
export type Sums = Record<
  (typeof COUNTS)[number] | (typeof ENDS)[number] | "cost" | "pending",
  bigint
> & { name: string; row?: UsageRowJson };

interface Measure {
  title: string;
  valueOf: (sums: Sums) => bigint;
  shown: (value: bigint, currency: string) => string;
}
const MEASURES: Record<string, Measure> = {
  cost: {
    title: text.cost,
    valueOf: (each) => each.cost,
    shown: (value, currency) => decimal(value, PICOS, minorDigits(currency)),
  },
  requests: { title: t.requests, valueOf: (each) => each.requestCount, shown: count },
  input: {
    title: t.inputTokens,
    valueOf: (each) => each.inputTokenCount + each.cachedInputTokenCount,
    shown: count,
  },
  output: {
    title: t.outputTokens,
    valueOf: (each) => each.outputTokenCount + each.reasoningTokenCount,
    shown: count,
  },
  embedded: {
    title: t.embeddedTokens,
    valueOf: (each) => each.embeddingTokenCount,
    shown: count,
  },
};

export const usage: Page = {
  id: "usage",
  title: text.pages.usage,
  calls: [USAGE, OWN],
  Show: Usage,
};

type Report = Pick<GetOwnUsageResponseJson, "rows" | "total"> & { nextPageToken?: string };

function Usage() {
  const view = useView();
  const isOwn = !view.may(USAGE);
  const found = useLoaded(async (caller) => {
    const own: Chosen = {
      ref: "",
      name: "",
      currency: view.session.currencyCode,
      organization: undefined,
      all: [],
    };
    const chosen = isOwn ? own : await organizationOf(caller, view);
    const period = await periodOf(caller, view, chosen.ref, isOwn);
    const filter = filterOf(view);
    const asked = { ...period.request, ...filter.request, groupBy: GROUP_BY };
    const isPart = Object.keys(filter.request).length > 0; // the forecast is of everything
    const hasForecast = !isOwn && !isPart && period.request.month === monthOf(new Date());
    const [report, forecast, other] = await Promise.all([
      reportOf(caller, view, isOwn, chosen.ref, asked),
      hasForecast
        ? tried(
            caller("BillingService/GetForecast", {
              organization: chosen.ref,
              month: period.request.month ?? "",
            }),
          )
        : null,
      otherOf(caller, view, isOwn, chosen.ref, { ...period.request, ...filter.request }),
    ]);
    return { chosen, period, filter, report, forecast, other };
  });
  return (
    <Show of={found}>
      {({ chosen, period, filter, report, forecast, other }) => {
        const rows = report.rows ?? [];
        const total = summed(report.total ? [report.total] : rows);
        return (
          <>
            <div className="controls">
              {isOwn ? <Whose /> : <OrganizationChoice of={chosen} />}
              <PeriodChoice of={period} />
              <MeasureChoice />
              <GroupingChoice isOwn={isOwn} />
            </div>
            <OtherDays />
            <Filter />
            <Narrowed />
            {filter.isFaulty && <Remark kind="bad">{t.labelFault}</Remark>}
            <UsageTiles total={total} currency={chosen.currency} />
            {forecast && <Forecast of={forecast} />}
            {report.nextPageToken && <Remark kind="warning">{t.first(count(ROWS_MAX))}</Remark>}
            <Other of={other} isOwn={isOwn} total={total} currency={chosen.currency} />
            <DaysAndModels rows={rows} total={total} period={period} currency={chosen.currency} />
            {total.pending > 0n && (
              <Note>
                {t.pending(
                  `${decimal(total.pending, PICOS, minorDigits(chosen.currency))} ${chosen.currency}`,
                )}
              </Note>
            )}
            <Command>{terminal(view, isOwn, chosen, period) + filter.options}</Command>
          </>
        );
      }}
    </Show>
  );
}

async function reportOf(
  caller: Caller,
  view: View,
  isOwn: boolean,
  organization: string,
  asked: GetUsageRequestJson,
): Promise<Report> {
  if (!isOwn) return caller(USAGE, { ...asked, organization, pageSize: ROWS_MAX });
  const { project: _, ...own } = asked;
  return caller(OWN, { ...own, project: view.asked("of") === "project" });
}

function terminal(
  view: View,
  isOwn: boolean,
  chosen: Chosen,
  { request: { month, firstDay, lastDay } }: Period,
): string {
  const by = GROUPINGS[view.asked("by")]?.word ?? "day";
  const word = by === "label:" ? `label:${quoted(view.asked("label_key") || "KEY")}` : by;
  if (!isOwn)
    return `weir month show ${month ?? monthOf(new Date())} --org ${chosen.name || "ORG"} --by ${word}`;
  return `weir usage ${month ?? `--from ${firstDay} --to ${lastDay}`}${view.asked("of") === "project" ? " --all-keys" : ""}`;
}

// Choice between the key and its project, whose sum a key of some models only may not see.
function Whose() {
  const view = useView();
  return (
    <Choice
      name={t.of}
      options={[
        ["", t.thisKey],
        ["project", t.allKeys],
      ]}
      value={view.asked("of")}
      onChange={(of) => view.go({ of })}
    />
  );
}

function measureOf(view: View): string {
  return Object.hasOwn(MEASURES, view.asked("show")) ? view.asked("show") : "cost";
}

// Choice of what the bars show.
export function MeasureChoice() {
  const view = useView();
  const options = Object.entries(MEASURES).map(([value, { title }]): [string, string] => [
    value,
    title,
  ]);
  return (
    <Choice
      name={t.chart}
      options={options}
      value={measureOf(view)}
      onChange={(show) => view.go({ show: show === "cost" ? "" : show })}
    />
  );
}

function GroupingChoice({ isOwn }: { isOwn: boolean }) {
  const view = useView();
  const isHidden = (by: string) =>
    isOwn &&
    (by === "project" || by === "key" || (view.asked("of") === "project" && by !== "hour"));
  const all = Object.entries(GROUPINGS).filter(([value]) => !isHidden(value));
  const options = all.map(([value, { title }]): [string, string] => [value, title]);
  return (
    <Choice
      name={t.alsoBy}
      options={[["", t.noGrouping], ...options]}
      value={Object.hasOwn(GROUPINGS, view.asked("by")) ? view.asked("by") : ""}
      onChange={(by) => view.go({ by, page: "" })}
    />
  );
}

// Period of a report: a month, the last days, or days between two dates.
export interface Period {
  request: Pick<GetUsageRequestJson, "month" | "firstDay" | "lastDay">;
  days: string[];
  title: string;
  value: string;
  options: [string, string][];
}

export async function periodOf(
  caller: Caller,
  view: View,
  organization: string,
  isOwn: boolean,
): Promise<Period> {
  const now = new Date();
  const last = Array.from({ length: OWN_MONTHS }, (_, back) => monthOf(now, back));
  const asked = last.includes(view.asked("month")) ? view.asked("month") : last[0]!;
  const months = isOwn
    ? { month: asked, options: last.map((each): [string, string] => [each, each]) }
    : await monthChosen(caller, view, organization);
  const options = [...months.options, ...RANGES];
  const range = view.asked("range");
  if (!RANGES.some(([value]) => value === range))
    return {
      request: { month: months.month },
      days: daysOf(months.month),
      title: months.month,
      value: months.month,
      options,
    };
  const lastDay = (range === "days" && view.asked("to")) || dayOf(now.getTime());
  const firstDay =
    (range === "days" && view.asked("from")) ||
    dayOf(Date.parse(lastDay), (Number(range) || 30) - 1);
  return {
    request: { firstDay, lastDay },
    days: daysBetween(firstDay, lastDay),
    title: t.fromTo(firstDay, lastDay),
    value: range,
    options,
  };
}

export function PeriodChoice({ of: { options, value } }: { of: Period }) {
  const view = useView();
  const changed = (next: string) =>
    view.go(
      next.includes("-")
        ? { month: next, range: "", from: "", to: "", page: "" }
        : { month: "", range: next, from: "", to: "", page: "" },
    );
  return <Choice name={t.time} options={options} value={value} onChange={changed} />;
}

export function OtherDays() {
  const view = useView();
  if (view.asked("range") !== "days") return null;
  return (
    <Search
      terms={[
        { name: "from", label: t.firstDay, type: "date" },
        { name: "to", label: t.lastDay, type: "date" },
      ]}
    />
  );
}

// Filters of the address that rows of a grouping lead to, and their options of the terminal.
const NARROWED: [string, "project" | "apiKey" | "model", string][] = [
  ["only_project", "project", "--project"],
  ["only_key", "apiKey", "--key"],
  ["model", "model", ""], // the command has no such option
];

interface Filtered {
  request: Pick<GetUsageRequestJson, "endUser" | "labels" | "project" | "apiKey" | "model">;
  options: string;
  isFaulty: boolean;
}

function filterOf(view: View): Filtered {
  const endUser = view.asked("end_user");
  const label = view.asked("label");
  const cut = label.indexOf("=");
  const labels = cut > 0 ? { labels: { [label.slice(0, cut)]: label.slice(cut + 1) } } : {};
  const narrowed = NARROWED.filter(([name]) => view.asked(name) && view.may(USAGE));
  return {
    request: {
      ...(endUser ? { endUser } : {}),
      ...labels,
      ...Object.fromEntries(narrowed.map(([name, field]) => [field, view.asked(name)])),
    },
    options: `${narrowed.map(([name, , option]) => option && ` ${option} ${quoted(view.asked(name))}`).join("")}${endUser && ` --end-user ${quoted(endUser)}`}${cut > 0 ? ` --label ${quoted(label)}` : ""}`,
    isFaulty: label !== "" && cut < 1,
  };
}

function Filter() {
  const view = useView();
  const key =
    view.asked("by") === "label"
      ? [{ name: "label_key", label: t.labelKey, placeholder: "team" }]
      : [];
  return (
    <Search
      terms={[
        ...key,
        { name: "end_user", label: t.onlyEndUser },
        { name: "label", label: t.onlyLabel, placeholder: "team=search" },
      ]}
    />
  );
}

// Project, key and model that were chosen in a table, each with a link that shows all of them again.
function Narrowed() {
  const view = useView();
  const all = NARROWED.filter(([name]) => view.asked(name) && view.may(USAGE));
  if (all.length === 0) return null;
  return (
    <p className="badges">
      {all.map(([name]) => (
        <a key={name} className="badge" href={view.address({ [name]: "", page: "" })}>
          {t.only(name, view.asked(name))}
        </a>
      ))}
    </p>
  );
}

export function UsageTiles({ total, currency }: { total: Sums; currency: string }) {
  const { unit } = text.tokens;
  return (
    <Tiles>
      <Tile
        name={text.cost}
        value={brief(total.cost, currency)}
        unit={currency}
        note={t.beforePlan}
      />
      <Tile name={t.requests} value={count(total.requestCount)} />
      <Tile name={t.computed} value={count(total.inputTokenCount)} unit={unit} />
      <Tile name={t.cachedInput} value={count(total.cachedInputTokenCount)} unit={unit} />
      <Tile name={text.tokens.output} value={count(total.outputTokenCount)} unit={unit} />
      {total.reasoningTokenCount > 0n && (
        <Tile name={text.tokens.thinking} value={count(total.reasoningTokenCount)} unit={unit} />
      )}
      {total.embeddingTokenCount > 0n && (
        <Tile name={text.tokens.embedded} value={count(total.embeddingTokenCount)} unit={unit} />
      )}
    </Tiles>
  );
}

function Forecast({ of }: { of: Tried<GetForecastResponseJson> }) {
  if ("error" in of) return <Problem of={of.error} />;
  const { expected, low, high, confidencePercent = 0, method = "", warnings = [] } = of.value;
  if (!expected) return <Remark>{t.noForecast}</Remark>;
  return (
    <Remark>
      <strong>{t.forecast(money(expected))}</strong>
      {low && high ? t.band(money(low), money(high), confidencePercent) : ""}. {method}{" "}
      {warnings.join(" ")}
    </Remark>
  );
}

interface OtherFound {
  by: string;
  head: string;
  rows: Sums[];
  left: number;
  next: string;
}

// Rows of the chosen grouping, the highest cost first. A key's own usage has no pages.
async function otherOf(
  caller: Caller,
  view: View,
  isOwn: boolean,
  organization: string,
  asked: GetUsageRequestJson,
): Promise<Tried<OtherFound> | null> {
  const by = view.asked("by");
  const grouping = Object.hasOwn(GROUPINGS, by) ? GROUPINGS[by] : undefined;
  const labelKey = by === "label" ? view.asked("label_key") : "";
  if (!grouping || (by === "label" && !labelKey)) return null;
  const groupBy = [grouping.grouping];
  const page = {
    pageSize: PAGE_SIZE,
    pageToken: view.asked("page"),
    largestFirst: by !== "hour",
  };
  const found = await tried<Report>(
    isOwn
      ? caller(OWN, { ...asked, project: view.asked("of") === "project", groupBy, labelKey })
      : caller(USAGE, { ...asked, organization, groupBy, labelKey, ...page }),
  );
  if ("error" in found) return found;
  const rows = (found.value.rows ?? []).map((row) => ({
    ...summed([row], grouping.nameOf(row)),
    row,
  }));
  if (isOwn && by !== "hour") rows.sort((one, other) => (one.cost < other.cost ? 1 : -1));
  const shown = isOwn ? rows.slice(0, PAGE_SIZE) : rows;
  return {
    value: {
      by,
      head: labelKey ? t.labelNamed(labelKey) : grouping.title,
      rows: shown,
      left: rows.length - shown.length,
      next: found.value.nextPageToken ?? "",
    },
  };
}

function Other({
  of,
  isOwn,
  total,
  currency,
}: {
  of: Tried<OtherFound> | null;
  isOwn: boolean;
  total: Sums;
  currency: string;
}) {
  const view = useView();
  if (of === null) return view.asked("by") === "label" ? <Remark>{t.enterLabel}</Remark> : null;
  if ("error" in of) return <Problem of={of.error} />;
  const { by, head, rows, left, next } = of.value;
  return (
    <>
      <h2>{t.by(head)}</h2>
      <UsageTable
        caption={t.usageBy(head)}
        head={head}
        rows={rows}
        total={total}
        currency={currency}
        nameOf={(each) => <Grouped by={by} of={each} />}
      />
      {left > 0 && <Note>{t.notShown(count(left))}</Note>}
      {!isOwn && <Pages next={next} />}
    </>
  );
}

// Name of a row; that of an end user or a label leads to its usage alone.
function Grouped({ by, of: { name, row } }: { by: string; of: Sums }) {
  const view = useView();
  if (by === "end_user" && row?.endUserId && view.may("BillingService/GetEndUser")) {
    const kept = Object.fromEntries(
      ["org", "month", "range", "from", "to", "show"].map((each) => [each, view.asked(each)]),
    );
    return (
      <a href={addressOf("end-users", { ...kept, user: row.endUserId })}>
        <Name of={name} />
      </a>
    );
  }
  const only = { project: row?.projectName, key: row?.apiKeyPrefix }[by];
  if (only && view.may(USAGE))
    return <a href={view.address({ [`only_${by}`]: only, by: "", page: "" })}>{name}</a>;
  if (by === "end_user" && row?.endUser)
    return <a href={view.address({ end_user: row.endUser, by: "", page: "" })}>{name}</a>;
  if (by !== "label" || row?.labelValue === undefined) return name;
  return (
    <a
      href={view.address({
        label: `${view.asked("label_key")}=${row.labelValue}`,
        by: "",
        page: "",
      })}
    >
      {name || t.emptyValue}
    </a>
  );
}

// Bars and table by day, and table by model, of rows by day and model.
export function DaysAndModels({
  rows,
  total,
  period,
  currency,
}: {
  rows: UsageRowJson[];
  total: Sums;
  period: Period;
  currency: string;
}) {
  const view = useView();
  const byModel = grouped(rows, (row) => row.model ?? "");
  return (
    <>
      <h2>{t.byDay}</h2>
      <DayBars
        rows={rows}
        byModel={byModel}
        period={period}
        measure={measureOf(view)}
        currency={currency}
      />
      <UsageTable
        caption={t.usageBy(t.day)}
        head={t.dayUtc}
        rows={grouped(rows, (row) => row.day ?? "")}
        total={total}
        currency={currency}
        nameOf={({ name }) =>
          view.may(USAGE) ? (
            <a href={addressOf("requests", { org: view.asked("org"), day: name })}>{name}</a>
          ) : (
            name
          )
        }
      />
      <h2>{t.byModel}</h2>
      <UsageTable
        caption={t.usageBy(text.model)}
        head={text.model}
        rows={byModel}
        total={total}
        currency={currency}
        nameOf={({ name }) =>
          view.may(USAGE) && view.page.id === "usage" ? (
            <a href={view.address({ model: name, page: "" })}>{name}</a>
          ) : (
            name
          )
        }
      />
    </>
  );
}

// One row with the sums of others.
export function summed(rows: UsageRowJson[], name = t.total): Sums {
  const all: Sums = {
    name,
    cost: 0n,
    pending: 0n,
    requestCount: 0n,
    inputTokenCount: 0n,
    cachedInputTokenCount: 0n,
    outputTokenCount: 0n,
    reasoningTokenCount: 0n,
    embeddingTokenCount: 0n,
    cancelled: 0n,
    limited: 0n,
    failed: 0n,
  };
  for (const row of rows) {
    for (const field of COUNTS) all[field] += whole(row[field]);
    for (const field of ENDS) all[field] += whole(row[field]?.requestCount);
    all.pending += picosOf(row.pendingAmount);
    all.cost += picosOf(row.cost);
  }
  return all;
}

export function grouped(rows: UsageRowJson[], nameOf: (row: UsageRowJson) => string): Sums[] {
  const groups = new Map<string, UsageRowJson[]>();
  for (const row of rows) groups.set(nameOf(row), [...(groups.get(nameOf(row)) ?? []), row]);
  return [...groups].map(([name, those]) => summed(those, name));
}

interface UsageRows {
  caption: string;
  head: string;
  rows: Sums[];
  total: Sums;
  currency: string;
  nameOf?: Column<Sums>["cell"];
}

// Table of sums with their total.
export function UsageTable({
  caption,
  head,
  rows,
  total,
  currency,
  nameOf = (each) => each.name,
}: UsageRows) {
  const all = [...rows, total];
  const least = places(
    all.map((each) => each.cost),
    PICOS,
    minorDigits(currency),
  );
  const counted = (name: string, field: keyof Sums, isAlways = true) =>
    isAlways || all.some((each) => (each[field] as bigint) > 0n)
      ? [column<Sums>(name, (each) => count(each[field] as bigint), true)]
      : [];
  const columns = [
    column<Sums>(head, (each) => (each === total ? each.name : nameOf(each))),
    ...counted(t.requests, "requestCount"),
    ...counted(text.tokens.input, "inputTokenCount"),
    ...counted(t.cachedInput, "cachedInputTokenCount"),
    ...counted(text.tokens.output, "outputTokenCount"),
    ...counted(text.tokens.thinking, "reasoningTokenCount", false),
    ...counted(text.tokens.embedded, "embeddingTokenCount"),
    ...counted(t.cancelled, "cancelled"),
    ...counted(t.limited, "limited", false),
    ...counted(t.failed, "failed"),
    column<Sums>(text.costIn(currency), (each) => decimal(each.cost, PICOS, least), true),
  ];
  return (
    <Table
      caption={caption}
      columns={columns}
      rows={rows}
      empty={t.none}
      foot={total}
      isGrid
      keyOf={(each) => each.name}
    />
  );
}

// Shown only where a row has such tokens.
export function thinkingColumn(rows: UsageRowJson[]): Column<UsageRowJson>[] {
  const isShown = rows.some((each) => whole(each.reasoningTokenCount) > 0n);
  return isShown
    ? [column(text.tokens.thinking, (each) => count(each.reasoningTokenCount), true)]
    : [];
}

interface Drawn {
  rows: UsageRowJson[];
  byModel: Sums[];
  period: Period;
  measure: string;
  currency: string;
}

// Bars of each day, stacked by model: the largest ones, then all others together.
function DayBars({ rows, byModel, period, measure, currency }: Drawn) {
  const { title, valueOf, shown } = MEASURES[measure]!;
  const models = byModel
    .filter((each) => valueOf(each) > 0n)
    .sort((one, other) => (valueOf(one) < valueOf(other) ? 1 : -1))
    .map((each) => each.name);
  const apart = models.length > SERIES_MAX ? models.slice(0, SERIES_MAX - 1) : models;
  const series = [...apart, ...(apart.length < models.length ? [t.otherModels] : [])];
  const sums = new Map<string, bigint[]>(period.days.map((day) => [day, series.map(() => 0n)]));
  for (const row of rows) {
    const parts = sums.get(row.day ?? "");
    const known = apart.indexOf(row.model ?? "");
    const index = known < 0 ? series.length - 1 : known;
    if (parts?.[index] !== undefined) parts[index] += valueOf(summed([row]));
  }
  const label = t.barsOf(measure === "cost" ? t.in(title, currency) : title, period.title);
  return (
    <Bars
      label={label}
      values={[...sums]}
      series={series.map(plain)}
      shown={(value) => shown(value, currency)}
    />
  );
}
