// Usage of a month or of days: by day as stacked bars and table, by model, and by end user, label, hour, project or
// key. A key without billing sees its own.

import { SERIES_MAX, bars } from "./chart.mjs";
import { choice, column, command, h, remark, swap, table, tile, tiles } from "./dom.mjs";
import { brief, count, dayOf, daysBetween, daysOf, decimal, minorDigits, money, monthOf, picosOf, places, plain, quoted, whole } from "./format.mjs";
import { problem } from "./view.mjs";

const USAGE = "BillingService/GetUsage", OWN = "InferenceService/GetOwnUsage", FORECAST = "BillingService/GetForecast", END_USER = "BillingService/GetEndUser";
const PICOS = 12, ROWS_MAX = 10000, OWN_MONTHS = 4; // months that a key without billing can choose
const RANGES = [["7", "Last 7 days"], ["30", "Last 30 days"], ["90", "Last 90 days"], ["days", "Other days"]];
const GROUP_BY = ["USAGE_GROUPING_DAY", "USAGE_GROUPING_MODEL"];
const PAGE_SIZE = 100; // rows of one grouping
// Groupings that can be chosen: title, grouping of the contract, name of a row, word of the terminal.
const OTHERS = {
  end_user: ["End user", "USAGE_GROUPING_END_USER", (row) => row.endUser || (row.endUserId ? `(erased) ${row.endUserId}` : NOT_GIVEN), "end-user"],
  label: ["Label", "USAGE_GROUPING_LABEL", (row) => row.labelValue ?? NOT_GIVEN, "label:"],
  hour: ["Hour (UTC)", "USAGE_GROUPING_HOUR", (row) => row.hour.replace("T", " ").replace("Z", ""), "hour"],
  project: ["Project", "USAGE_GROUPING_PROJECT", (row) => row.projectName, "project"],
  key: ["API key", "USAGE_GROUPING_API_KEY", (row) => `${row.apiKeyName} (${row.apiKeyPrefix})`, "key"],
};
const NOT_GIVEN = "(not given)";
const COUNTS = ["requestCount", "inputTokenCount", "cachedInputTokenCount", "outputTokenCount", "reasoningTokenCount", "embeddingTokenCount"];
const ENDS = ["cancelled", "limited", "failed"];
const SHOWN = {
  cost: ["Cost", (row) => row.cost, (value, currency) => decimal(value, PICOS, minorDigits(currency))],
  requests: ["Requests", (row) => row.requestCount, count],
  input: ["Input tokens", (row) => row.inputTokenCount + row.cachedInputTokenCount, count],
  output: ["Output tokens", (row) => row.outputTokenCount + row.reasoningTokenCount, count],
  embedded: ["Embedded tokens", (row) => row.embeddingTokenCount, count],
};

export const usage = {
  id: "usage",
  title: "Usage",
  calls: [USAGE, OWN],
  scopes: "inference, billing or admin",
  async show(view) {
    const isOwn = !view.may(USAGE);
    const { ref, name, currency, chooser } = isOwn ? { ref: "", name: "", currency: view.session.currencyCode, chooser: whose(view) } : await view.organization();
    const { request, days, periods, title } = await period(view, isOwn, ref);
    const filter = filterOf(view);
    const { what, chooser: shown } = chartChoice(view);
    const asked = { ...request, ...filter.request, groupBy: GROUP_BY, ...(isOwn ? { project: view.params.get("of") === "project" } : { organization: ref, pageSize: ROWS_MAX }) };
    const isPart = filter.request.endUser || filter.request.labels; // the forecast is of everything
    const forecast = !isOwn && !isPart && request.month === monthOf(new Date()) ? view.call(FORECAST, { organization: ref, month: request.month }).catch((error) => ({ error })) : null;
    const [found, expected, other] = await Promise.all([view.call(isOwn ? OWN : USAGE, asked), forecast, otherPart(view, isOwn, asked, currency)]);
    const rows = found.rows ?? [];
    const total = summed(found.total ? [found.total] : rows);
    swap(view.body,
      h("div", { class: "controls" }, chooser, periods, shown, otherChoice(view, isOwn)), ownDays(view), filter.form, filter.fault,
      usageTiles(total, currency),
      expected && forecastPart(expected),
      found.nextPageToken && remark("warning", `These are the first ${count(ROWS_MAX)} days of a model: choose a shorter time for all of them.`),
      other(total),
      dayAndModelParts(rows, total, { days, title, what, currency }),
      total.pending > 0n && h("p", { class: "note" }, `${decimal(total.pending, PICOS, minorDigits(currency))} ${currency} of this cost is recorded and will be posted within seconds.`),
      command("Command", (isOwn ? terminal(asked) : `weir month show ${request.month ?? monthOf(new Date())} --org ${name || "ORG"} --by ${word(view)}`) + filter.options));
  },
};

// Choice of what the bars show.
export function chartChoice(view) {
  const what = SHOWN[view.params.get("show")] ? view.params.get("show") : "cost";
  const options = Object.entries(SHOWN).map(([value, [text]]) => [value, text]);
  return { what, chooser: choice("Chart", options, what, (show) => view.go({ show: show === "cost" ? "" : show })) };
}

export function usageTiles(total, currency) {
  return tiles(tile("Cost", brief(total.cost, currency), currency, "before plan, credit and tax"), tile("Requests", count(total.requestCount)),
    tile("Input, computed", count(total.inputTokenCount), "tokens"), tile("Input, cached", count(total.cachedInputTokenCount), "tokens"), tile("Output", count(total.outputTokenCount), "tokens"),
    total.reasoningTokenCount > 0n && tile("Thinking", count(total.reasoningTokenCount), "tokens"),
    total.embeddingTokenCount > 0n && tile("Embedded", count(total.embeddingTokenCount), "tokens"));
}

// Bars and table by day, and table by model, of rows by day and model.
export function dayAndModelParts(rows, total, { days, title, what, currency }) {
  const [byDay, byModel] = [grouped(rows, (row) => row.day), grouped(rows, (row) => row.model)];
  return [
    h("h2", {}, "By day"),
    dayBars(rows, byModel, days, what, currency, title),
    usageTable("Usage by day", "Day (UTC)", byDay, total, currency),
    h("h2", {}, "By model"),
    usageTable("Usage by model", "Model", byModel, total, currency),
  ];
}

// Table of sums with their total.
export function usageTable(caption, head, rows, total, currency, nameOf = undefined) {
  return table(caption, columns(head, currency, [...rows, total], nameOf), rows, { empty: "No usage in this time.", foot: total, isGrid: true });
}

function terminal({ month, firstDay, lastDay, project }) {
  return `weir usage ${month ?? `--from ${firstDay} --to ${lastDay}`}${project ? " --all-keys" : ""}`;
}

// The chosen grouping besides day and model.
function otherOf(view) {
  const by = view.params.get("by") ?? "";
  return Object.hasOwn(OTHERS, by) ? by : "";
}

function word(view) {
  const by = otherOf(view);
  return by ? `${OTHERS[by][3]}${by === "label" ? view.params.get("label_key") || "KEY" : ""}` : "day";
}

function otherChoice(view, isOwn) {
  const isHidden = (by) => isOwn && (by === "project" || by === "key" || (view.params.get("of") === "project" && by !== "hour"));
  const options = Object.entries(OTHERS).filter(([by]) => !isHidden(by)).map(([by, [title]]) => [by, title]);
  return choice("Also by", [["", "nothing else"], ...options], otherOf(view), (by) => view.go({ by, page: "" }));
}

// Filter by end user and label, as form, fields of the request, and options of the terminal.
function filterOf(view) {
  const [endUser, label] = ["end_user", "label"].map((name) => view.params.get(name) ?? "");
  const cut = label.indexOf("=");
  const form = view.search({
    ...(otherOf(view) === "label" && { label_key: ["Label to group by", { placeholder: "team" }] }),
    end_user: ["Only this end user", {}], label: ["Only with the label", { placeholder: "team=search" }],
  });
  const fault = label && cut < 1 && remark("bad", "The label must be a key and a value, such as team=search. It is not applied.");
  return {
    form, fault,
    request: { endUser, ...(cut > 0 && { labels: { [label.slice(0, cut)]: label.slice(cut + 1) } }) },
    options: `${endUser && ` --end-user ${quoted(endUser)}`}${cut > 0 ? ` --label ${quoted(label)}` : ""}`,
  };
}

// Section of the chosen grouping, the highest cost first, as a function of the total. A key's own usage has no pages.
async function otherPart(view, isOwn, asked, currency) {
  const by = otherOf(view), labelKey = by === "label" ? (view.params.get("label_key") ?? "") : "";
  if (!by) return () => null;
  if (by === "label" && !labelKey) return () => remark("", "Enter the label to group by, such as team.");
  const [title, grouping, nameOf] = OTHERS[by];
  const page = isOwn ? {} : { pageSize: PAGE_SIZE, pageToken: view.params.get("page") ?? "", largestFirst: by !== "hour" };
  const found = await view.call(isOwn ? OWN : USAGE, { ...asked, groupBy: [grouping], labelKey, ...page }).catch((error) => ({ error }));
  if (found.error) return () => problem(found.error);
  let rows = (found.rows ?? []).map((row) => ({ ...summed([row], nameOf(row)), row }));
  if (isOwn && by !== "hour") rows.sort((one, other) => (one.cost < other.cost ? 1 : -1));
  const left = isOwn ? rows.length - PAGE_SIZE : 0;
  rows = left > 0 ? rows.slice(0, PAGE_SIZE) : rows;
  const head = labelKey ? `Label ${labelKey}` : title;
  return (total) => [
    h("h2", {}, `By ${by === "key" ? "API key" : head[0].toLowerCase() + head.slice(1)}`),
    usageTable(`Usage by ${title}`, head, rows, total, currency, (each) => nameCell(view, by, each)),
    left > 0 && h("p", { class: "note" }, `${count(left)} more with a lower cost are not shown.`),
    h("div", { class: "buttons" },
      view.params.get("page") && h("button", { type: "button", click: () => view.go({ page: "" }) }, "First page"),
      found.nextPageToken && h("button", { type: "button", click: () => view.go({ page: found.nextPageToken }) }, "Next page")),
  ];
}

// Name of a row; that of an end user or a label leads to its usage alone.
function nameCell(view, by, { name, row }) {
  if (!row) return name;
  if (by === "end_user" && row.endUserId && view.may(END_USER)) return h("a", { href: endUserAddress(view, row.endUserId) }, h("bdi", { class: "name" }, name));
  if (by === "end_user" && row.endUser) return h("a", { href: view.address({ end_user: row.endUser, by: "", page: "" }) }, name);
  if (by !== "label" || row.labelValue === undefined) return name;
  return h("a", { href: view.address({ label: `${view.params.get("label_key")}=${row.labelValue}`, by: "", page: "" }) }, name || "(empty)");
}

// Page of an end user, for the same time.
function endUserAddress(view, user) {
  const kept = ["org", "month", "range", "from", "to", "show"].map((name) => [name, view.params.get(name) ?? ""]).filter(([, value]) => value);
  return `#/end-users?${new URLSearchParams([...kept, ["user", user]])}`;
}

// Choice between the key and its project, whose sum a key of some models only may not see.
function whose(view) {
  return choice("Usage of", [["", "this key"], ["project", "all keys of the project"]], view.params.get("of") ?? "", (of) => view.go({ of }));
}

// Period of the report: a month, the last days, or days between two dates.
export async function period(view, isOwn, ref) {
  const now = new Date(), range = view.params.get("range") ?? "";
  const known = isOwn ? Array.from({ length: OWN_MONTHS }, (_, back) => [monthOf(now, back), monthOf(now, back)]) : null;
  const { chosen, options } = known ? { chosen: known.find(([month]) => month === view.params.get("month"))?.[0] ?? known[0][0], options: known } : await view.month(ref);
  const periods = choice("Time (UTC)", [...options, ...RANGES], RANGES.some(([value]) => value === range) ? range : chosen,
    (next) => view.go(/-/.test(next) ? { month: next, range: "", from: "", to: "" } : { month: "", range: next, from: "", to: "" }));
  if (!RANGES.some(([value]) => value === range)) return { request: { month: chosen }, days: daysOf(chosen), periods, title: chosen };
  const lastDay = (range === "days" && view.params.get("to")) || dayOf(now.getTime());
  const firstDay = (range === "days" && view.params.get("from")) || dayOf(Date.parse(lastDay), (Number(range) || 30) - 1);
  return { request: { firstDay, lastDay }, days: daysBetween(firstDay, lastDay), periods, title: `${firstDay} to ${lastDay}` };
}

export function ownDays(view) {
  return view.params.get("range") === "days" && view.search({ from: ["First day (UTC)", { type: "date", required: true }], to: ["Last day (UTC), 92 days at most", { type: "date", required: true }] });
}

// One row with the sums of others.
export function summed(rows, name = "Total") {
  const all = { name, cost: 0n, pending: 0n };
  for (const field of [...COUNTS, ...ENDS]) all[field] = 0n;
  for (const row of rows) {
    for (const field of COUNTS) all[field] += whole(row[field]);
    for (const field of ENDS) all[field] += whole(row[field]?.requestCount);
    all.pending += picosOf(row.pendingAmount);
    all.cost += picosOf(row.cost);
  }
  return all;
}

export function grouped(rows, nameOf) {
  return [...Map.groupBy(rows, nameOf)].map(([name, those]) => summed(those, name));
}

function columns(head, currency, rows, nameOf = (each) => each.name) {
  const least = places(rows.map((each) => each.cost), PICOS, minorDigits(currency));
  const counted = (name, field, always = true) => (always || rows.some((each) => each[field] > 0n) ? [column(name, (each) => count(each[field]), true)] : []);
  return [
    column(head, nameOf), ...counted("Requests", "requestCount"), ...counted("Input", "inputTokenCount"), ...counted("Cached input", "cachedInputTokenCount"),
    ...counted("Output", "outputTokenCount"), ...counted("Thinking", "reasoningTokenCount", false), ...counted("Embedded", "embeddingTokenCount"),
    ...counted("Cancelled", "cancelled"), ...counted("Limited", "limited", false), ...counted("Failed", "failed"),
    column(`Cost, ${currency}`, (each) => decimal(each.cost, PICOS, least), true),
  ];
}

// Shown only where a row has such tokens.
export function thinkingColumn(rows) {
  return rows.some((each) => whole(each.reasoningTokenCount) > 0n) ? [column("Thinking", (each) => count(each.reasoningTokenCount), true)] : [];
}

// Bars of each day, stacked by model: the largest ones, then all others together.
function dayBars(rows, byModel, days, what, currency, title) {
  const [name, valueOf, text] = SHOWN[what];
  const models = byModel.filter((each) => valueOf(each) > 0n).sort((one, other) => (valueOf(one) < valueOf(other) ? 1 : -1)).map((each) => each.name);
  const apart = models.length > SERIES_MAX ? models.slice(0, SERIES_MAX - 1) : models;
  const series = [...apart, ...(apart.length < models.length ? ["other models"] : [])];
  const byDay = Map.groupBy(rows, (row) => row.day);
  const values = days.map((day) => {
    const parts = series.map(() => 0n);
    for (const row of byDay.get(day) ?? []) {
      const index = apart.indexOf(row.model);
      if (series.length > 0) parts[index < 0 ? series.length - 1 : index] += valueOf(summed([row]));
    }
    return [day, parts];
  });
  return bars(`${name}${what === "cost" ? ` in ${currency}` : ""} by day, ${title} (UTC)`, values, series.map(plain), (value) => text(value, currency));
}

function forecastPart({ error, expected, low, high, confidencePercent, method, warnings = [] }) {
  if (error) return problem(error);
  if (!expected) return remark("", "There is no forecast yet. It needs one complete day of usage.");
  const range = low && high ? `, between ${money(low)} and ${money(high)} in ${confidencePercent} % of such months` : "";
  return remark("", h("strong", {}, `Forecast for the month: ${money(expected)}`), `${range}. ${plain(method)} ${warnings.map(plain).join(" ")}`);
}
