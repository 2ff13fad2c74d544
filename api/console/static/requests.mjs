// Requests of a day, and the timings of one request.

import { span } from "./chart.mjs";
import { badge, column, command, h, remark, swap, table, tile, tiles, time } from "./dom.mjs";
import { amount, amountPlaces, count, milliseconds, plain, whole, words } from "./format.mjs";
import { thinkingColumn } from "./usage.mjs";
import { problem } from "./view.mjs";

const ANY = "AdminService/GetRequest", OWN = "InferenceService/GetGeneration", USAGE = "BillingService/GetUsage";
const PAGE_SIZE = 100;
const STAGES = [
  ["auth", "authMs", "authenticate the key"], ["tokenize", "tokenizeMs", "tokenize the prompt"], ["admission", "admissionMs", "reserve tokens in quotas"],
  ["cold start", "coldStartMs", "start the engine"], ["queue", "queueMs", "wait in the queue"], ["prefill", "prefillMs", "compute the prompt"],
  ["decode", "decodeMs", "generate the output"], ["client stall", "clientStallMs", "wait for the client"], ["settle", "settleMs", "record the usage"],
];
const WITHOUT_TIMINGS = {
  STATE_RUNNING: "The request still runs. You see its timings when it has ended.",
  STATE_VOIDED: "It ended before anything was billed, so there are no timings.",
  STATE_EXPIRED: "Its server failed and another one settled it, so there are no timings.",
};

export const requests = {
  id: "requests",
  title: "Requests",
  calls: [ANY, OWN, USAGE],
  scopes: "admin, inference or billing",
  async show(view) {
    const parts = [];
    if (view.may(ANY) || view.may(OWN)) {
      parts.push(view.search({ id: ["Request id", { size: 38 }], ...(view.may(ANY) && { project: ["Project, if several have this id", { placeholder: "organization/project" }] }) }, "Look up"));
      if (view.params.get("id")) parts.push(await onePart(view).catch((error) => (view.left.signal.aborted ? [] : problem(error))));
      parts.push(command("Command", `weir trace ${view.params.get("id") || "REQUEST"}`));
    } else {
      parts.push(h("p", { class: "note" }, "To look up a single request, sign in with a key for admin or inference."));
    }
    if (view.may(USAGE)) parts.push(await dayPart(view));
    swap(view.body, parts);
  },
};

async function onePart(view) {
  const requestId = view.params.get("id");
  const found = view.may(ANY) ? await view.call(ANY, { requestId, project: view.params.get("project") ?? "" }) : await view.call(OWN, { requestId });
  const { generation } = found;
  const { usage = {}, timings } = generation;
  const isEmbedding = whole(usage.embeddingTokenCount) > 0n;
  return h("section", { "aria-label": "One request" },
    h("h2", {}, h("span", { class: "id" }, generation.requestId), " ", badge(words(generation.state, "STATE_")), " ", generation.outcome && badge(words(generation.outcome), generation.outcome === "FAILED" ? "bad" : "")),
    h("p", {}, `${plain(generation.model)}, admitted `, time(generation.admitTime), found.organizationName && `, ${plain(found.organizationName)}/${plain(found.projectName)}, key ${plain(found.apiKeyPrefix)}`),
    tiles(isEmbedding ? tile("Embedded", count(usage.embeddingTokenCount), "tokens") : [
      tile("Input", count(usage.inputTokenCount), "tokens", usage.cachedInputTokenCount ? `${count(usage.cachedInputTokenCount)} of them cached` : ""),
      tile("Output", count(usage.billedTokenCount), "tokens", `${usage.reasoningTokenCount ? `${count(usage.reasoningTokenCount)} of them thinking, ` : ""}${count(usage.generatedTokenCount)} generated, ${count(usage.deliveredTokenCount)} delivered`)],
    tile("Cost", generation.cost ? amount(generation.cost) : "\u2014", generation.cost?.currencyCode), timings?.ttftMs && tile("Time to first token", milliseconds(timings.ttftMs)), timings?.itlMaxMs && tile("Longest gap", milliseconds(timings.itlMaxMs), "", `median ${milliseconds(timings.itlP50Ms)}, 99th percentile ${milliseconds(timings.itlP99Ms)}`), timings && tile("Total time", milliseconds(timings.totalMs))),
    generation.migrationCount && remark("", `Moved to another engine ${generation.migrationCount} times; the timings include all engines.`),
    timings ? waterfall(timings, generation.settleTime) : remark("warning", WITHOUT_TIMINGS[generation.state] ?? "The request failed, or its server did, so there are no timings."),
    Object.keys(generation.labels ?? {}).length > 0 && h("p", { class: "note" }, `Labels: ${Object.entries(generation.labels).map(([name, value]) => `${plain(name)}=${plain(value)}`).join(", ")}`));
}

function waterfall(timings) {
  const stall = timings.clientStallMs ?? 0; // may overlap decode; it ends where the settlement begins
  const sum = STAGES.reduce((total, [, name]) => total + (timings[name] ?? 0), -stall);
  const all = Math.max(timings.totalMs ?? 0, sum, stall) || 1;
  let start = 0;
  const rows = STAGES.map(([name, part, meaning]) => {
    if (part === "clientStallMs") start = Math.max(all - (timings.settleMs ?? 0) - stall, 0);
    const row = { name, meaning, start, length: timings[part] ?? 0 };
    start += row.length;
    return row;
  });
  return table("Timings", [
    column("Stage", (each) => each.name),
    column("Duration", (each) => milliseconds(each.length), true),
    column("Time axis", (each) => span(each.start, each.length, all, each.name)),
    column("Meaning", (each) => each.name === "settle" && !each.length ? "not recorded" : each.meaning),
  ], rows, { isGrid: true });
}

async function dayPart(view) {
  const { ref, name, currency, chooser } = await view.organization();
  const day = /^\d{4}-\d{2}-\d{2}$/.test(view.params.get("day") ?? "") ? view.params.get("day") : new Date().toISOString().slice(0, 10);
  const asked = { organization: ref, month: day.slice(0, 7), day, groupBy: ["USAGE_GROUPING_REQUEST"], pageSize: PAGE_SIZE, pageToken: view.params.get("page") ?? "" };
  const { rows = [], nextPageToken = "" } = await view.call(USAGE, asked);
  const picker = h("input", { type: "date", value: day, change: () => picker.value && view.go({ day: picker.value, page: "" }) });
  return h("section", { "aria-label": "Requests of a day" },
    h("h2", {}, "Requests of a day"),
    h("div", { class: "controls" }, chooser, h("label", { class: "field" }, h("span", {}, "Day (UTC)"), picker)),
    requestTable(view, `Requests of ${day}`, rows, currency, `No requests were settled on ${day}.`),
    h("div", { class: "buttons" },
      view.params.get("page") && h("button", { type: "button", click: () => view.go({ page: "" }) }, "First page"),
      nextPageToken && h("button", { type: "button", click: () => view.go({ page: nextPageToken }) }, "Next page")),
    command("Command", `weir month show ${day.slice(0, 7)} --org ${name || "ORG"} --by request --day ${day}`));
}

// Table of requests, each with a link to its stages if the key may see them.
export function requestTable(view, caption, rows, currency, empty) {
  const least = amountPlaces(rows.map(costOf));
  const canLookUp = view.may(ANY);
  return table(caption, [
    column("Settled", (each) => time(each.settleTime)),
    column("Request", (each) => canLookUp
      ? h("a", { class: "id", href: `#/requests?id=${encodeURIComponent(each.requestId)}&project=${encodeURIComponent(each.projectId)}` }, each.requestId)
      : h("span", { class: "id" }, each.requestId)),
    column("Project and key", (each) => [each.projectName, h("div", { class: "note" }, `${plain(each.apiKeyName)}, ${plain(each.apiKeyPrefix)}`)]),
    column("Model", (each) => each.model),
    column("Ended", (each) => words(each.outcome)),
    column("In", (each) => count(each.inputTokenCount), true),
    column("Cached", (each) => count(each.cachedInputTokenCount), true),
    column("Out", (each) => count(each.outputTokenCount), true),
    ...thinkingColumn(rows),
    column("Embedded", (each) => count(each.embeddingTokenCount), true),
    column(`Cost, ${currency}`, (each) => amount(costOf(each), least), true),
  ], rows, { empty, key: (each) => each.requestId });
}

// Cost of a request: posted to the ledger, or in the first second only recorded.
function costOf({ amount: posted, pendingAmount }) {
  return whole(pendingAmount?.picos) || whole(pendingAmount?.units) ? pendingAmount : posted;
}
