// Usage of a month or of days: by day as stacked bars and table, and by model. A key without billing sees its own.

import { SERIES_MAX, bars } from "./chart.mjs";
import { choice, column, command, h, remark, swap, table, tile, tiles } from "./dom.mjs";
import { brief, count, dayOf, daysBetween, daysOf, decimal, minorDigits, money, monthOf, picosOf, places, plain, whole } from "./format.mjs";
import { problem } from "./view.mjs";

const USAGE = "BillingService/GetUsage", OWN = "InferenceService/GetOwnUsage", FORECAST = "BillingService/GetForecast";
const PICOS = 12, ROWS_MAX = 10000, OWN_MONTHS = 4; // months that a key without billing can choose
const RANGES = [["7", "Last 7 days"], ["30", "Last 30 days"], ["90", "Last 90 days"], ["days", "Other days"]];
const GROUP_BY = ["USAGE_GROUPING_DAY", "USAGE_GROUPING_MODEL"];
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
    const what = SHOWN[view.params.get("show")] ? view.params.get("show") : "cost";
    const asked = { ...request, groupBy: GROUP_BY, ...(isOwn ? { project: view.params.get("of") === "project" } : { organization: ref, pageSize: ROWS_MAX }) };
    const forecast = !isOwn && request.month === monthOf(new Date()) ? view.call(FORECAST, { organization: ref, month: request.month }).catch((error) => ({ error })) : null;
    const [found, expected] = await Promise.all([view.call(isOwn ? OWN : USAGE, asked), forecast]);
    const rows = found.rows ?? [];
    const [byDay, byModel, [total = summed([])]] = [grouped(rows, (row) => row.day), grouped(rows, (row) => row.model), grouped(rows, () => "Total")];
    const shown = choice("Chart", Object.entries(SHOWN).map(([value, [text]]) => [value, text]), what, (show) => view.go({ show: show === "cost" ? "" : show }));
    swap(view.body,
      h("div", { class: "controls" }, chooser, periods, shown), ownDays(view),
      tiles(tile("Cost", brief(total.cost, currency), currency, "before plan, credit and tax"), tile("Requests", count(total.requestCount)),
        tile("Input, computed", count(total.inputTokenCount), "tokens"), tile("Input, cached", count(total.cachedInputTokenCount), "tokens"), tile("Output", count(total.outputTokenCount), "tokens"),
        total.reasoningTokenCount > 0n && tile("Thinking", count(total.reasoningTokenCount), "tokens"),
        total.embeddingTokenCount > 0n && tile("Embedded", count(total.embeddingTokenCount), "tokens")),
      expected && forecastPart(expected),
      found.nextPageToken && remark("warning", `These are the first ${count(ROWS_MAX)} days of a model: choose a shorter time for all of them.`),
      h("h2", {}, "By day"),
      dayBars(rows, byModel, days, what, currency, title),
      table("Usage by day", columns("Day (UTC)", currency, [...byDay, total]), byDay, { empty: "No usage in this time.", foot: total, isGrid: true }),
      h("h2", {}, "By model"),
      table("Usage by model", columns("Model", currency, [...byModel, total]), byModel, { empty: "No usage in this time.", foot: total, isGrid: true }),
      total.pending > 0n && h("p", { class: "note" }, `${decimal(total.pending, PICOS, minorDigits(currency))} ${currency} of this cost is recorded and will be posted within seconds.`),
      command("Command", isOwn ? terminal(asked) : `weir month show ${request.month ?? monthOf(new Date())} --org ${name || "ORG"} --by day`));
  },
};

function terminal({ month, firstDay, lastDay, project }) {
  return `weir usage ${month ?? `--from ${firstDay} --to ${lastDay}`}${project ? " --all-keys" : ""}`;
}

// Choice between the key and its project, whose sum a key of some models only may not see.
function whose(view) {
  return choice("Usage of", [["", "this key"], ["project", "all keys of the project"]], view.params.get("of") ?? "", (of) => view.go({ of }));
}

// Period of the report: a month, the last days, or days between two dates.
async function period(view, isOwn, ref) {
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

function ownDays(view) {
  return view.params.get("range") === "days" && view.search({ from: ["First day (UTC)", { type: "date", required: true }], to: ["Last day (UTC), 92 days at most", { type: "date", required: true }] });
}

// One row with the sums of others.
function summed(rows, name = "Total") {
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

function grouped(rows, nameOf) {
  return [...Map.groupBy(rows, nameOf)].map(([name, those]) => summed(those, name));
}

function columns(head, currency, rows) {
  const least = places(rows.map((each) => each.cost), PICOS, minorDigits(currency));
  const counted = (name, field, always = true) => (always || rows.some((each) => each[field] > 0n) ? [column(name, (each) => count(each[field]), true)] : []);
  return [
    column(head, (each) => each.name), ...counted("Requests", "requestCount"), ...counted("Input", "inputTokenCount"), ...counted("Cached input", "cachedInputTokenCount"),
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
