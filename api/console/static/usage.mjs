// Usage of a month by day, as bars and table, and by model.

import { bars } from "./chart.mjs";
import { choice, column, command, h, remark, swap, table, tile, tiles } from "./dom.mjs";
import { count, daysOf, decimal, minorDigits, money, monthOf, picosOf, places, plain, whole } from "./format.mjs";
import { problem } from "./view.mjs";

const USAGE = "BillingService/GetUsage", FORECAST = "BillingService/GetForecast";
const PICOS = 12;
const SHOWN = {
  cost: ["Cost", (row) => costOf(row), (value, currency) => `${decimal(value, PICOS, minorDigits(currency))} ${currency}`],
  requests: ["Requests", (row) => whole(row.requestCount), (value) => `${count(value)} requests`],
  input: ["Input tokens", (row) => whole(row.inputTokenCount) + whole(row.cachedInputTokenCount), (value) => `${count(value)} tokens`],
  output: ["Output tokens", (row) => whole(row.outputTokenCount) + whole(row.reasoningTokenCount), (value) => `${count(value)} tokens`],
};

export const usage = {
  id: "usage",
  title: "Usage",
  calls: [USAGE],
  scopes: "billing or admin",
  async show(view) {
    const { ref, name, currency, chooser } = await view.organization();
    const { chosen, chooser: months } = await view.month(ref);
    const what = SHOWN[view.params.get("show")] ? view.params.get("show") : "cost";
    const asked = (groupBy) => view.call(USAGE, { organization: ref, month: chosen, groupBy: [groupBy] });
    const forecast = chosen === monthOf(new Date()) ? view.call(FORECAST, { organization: ref, month: chosen }).catch((error) => ({ error })) : null;
    const [byDay, byModel, expected] = await Promise.all([asked("USAGE_GROUPING_DAY"), asked("USAGE_GROUPING_MODEL"), forecast]);
    const [days, models, total] = [byDay.rows ?? [], byModel.rows ?? [], byDay.total ?? {}];
    const shown = choice("Chart", Object.entries(SHOWN).map(([value, [text]]) => [value, text]), what, (show) => view.go({ show: show === "cost" ? "" : show }));
    swap(view.body,
      h("div", { class: "controls" }, chooser, months, shown),
      tiles(tile("Requests", count(total.requestCount)), tile("Input, computed", count(total.inputTokenCount), "tokens"),
        tile("Input, cached", count(total.cachedInputTokenCount), "tokens"), tile("Output", count(total.outputTokenCount), "tokens"),
        whole(total.reasoningTokenCount) > 0n && tile("Thinking", count(total.reasoningTokenCount), "tokens"),
        whole(total.embeddingTokenCount) > 0n && tile("Embedded", count(total.embeddingTokenCount), "tokens"),
        tile("Cost", decimal(costOf(total), PICOS, minorDigits(currency)), currency, "before plan, credit and tax")),
      expected && forecastPart(expected),
      h("h2", {}, "By day"),
      dayBars(days, chosen, what, currency),
      table("Usage by day", columns("Day (UTC)", (each) => each.day, currency, [...days, total]), days, { empty: "No usage in this month.", foot: { ...total, day: "Total" }, isGrid: true }),
      h("h2", {}, "By model"),
      table("Usage by model", columns("Model", (each) => each.model, currency, [...models, total]), models, { empty: "No usage in this month.", foot: { ...total, model: "Total" }, isGrid: true }),
      pending(total),
      command("Command", `weir month show ${chosen} --org ${name || "ORG"} --by day`));
  },
};

function costOf(row) {
  return picosOf(row.amount) + picosOf(row.pendingAmount);
}

function columns(head, name, currency, rows) {
  const least = places(rows.map(costOf), PICOS, minorDigits(currency));
  return [
    column(head, name),
    column("Requests", (each) => count(each.requestCount), true),
    column("Input", (each) => count(each.inputTokenCount), true),
    column("Cached input", (each) => count(each.cachedInputTokenCount), true),
    column("Output", (each) => count(each.outputTokenCount), true),
    ...thinkingColumn(rows),
    column("Embedded", (each) => count(each.embeddingTokenCount), true),
    column("Cancelled", (each) => count(each.cancelled?.requestCount), true),
    column("Failed", (each) => count(each.failed?.requestCount), true),
    column(`Cost, ${currency}`, (each) => decimal(costOf(each), PICOS, least), true),
  ];
}

// Shown only where a row has such tokens.
export function thinkingColumn(rows) {
  return rows.some((each) => whole(each.reasoningTokenCount) > 0n) ? [column("Thinking", (each) => count(each.reasoningTokenCount), true)] : [];
}

function dayBars(rows, month, what, currency) {
  const [name, valueOf, text] = SHOWN[what];
  const values = new Map(rows.map((row) => [row.day, valueOf(row)]));
  return bars(`${name} by day of ${month} (UTC)`, daysOf(month).map((day) => [day, values.get(day) ?? 0n, text(values.get(day) ?? 0n, currency)]));
}

function pending(total) {
  return picosOf(total.pendingAmount) > 0n && h("p", { class: "note" }, `${money(total.pendingAmount)} of this cost is recorded and will be posted within seconds.`);
}

function forecastPart({ error, expected, low, high, confidencePercent, method, warnings = [] }) {
  if (error) return problem(error);
  if (!expected) return remark("", "There is no forecast yet. It needs one complete day of usage.");
  const range = low && high ? `, between ${money(low)} and ${money(high)} in ${confidencePercent} % of such months` : "";
  return remark("", h("strong", {}, `Forecast for the month: ${money(expected)}`), `${range}. ${plain(method)} ${warnings.map(plain).join(" ")}`);
}
