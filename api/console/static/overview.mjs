// Running requests and the engines that serve them.

import { badge, column, command, confirm, h, remark, swap, table, tile, tiles, time } from "./dom.mjs";
import { count, perMillion, plain, rate, secondsOf, wait, whole, words } from "./format.mjs";
import { asOf, problem } from "./view.mjs";

const LIVE_MS = 2000, ENGINES_MS = 10000;
const LIVE = "AdminService/ListLiveRequests", REPLICAS = "AdminService/ListReplicas", MODELS = "InferenceService/ListModels";
const KILL = "AdminService/KillRequest";
const WAITING = ["REQUEST_PHASE_PREPARING", "REQUEST_PHASE_QUEUED", "REQUEST_PHASE_LOADING"];
const STATE_KINDS = { REPLICA_STATE_READY: "good", REPLICA_STATE_FAILED: "bad", REPLICA_STATE_RESTARTING: "warning", REPLICA_STATE_TRIPPED: "warning" };

export const overview = {
  id: "overview",
  title: "Overview",
  calls: [LIVE, MODELS],
  scopes: "admin or inference",
  async show(view) {
    const live = h("section", { "aria-label": "Running requests" }), engines = h("section", { "aria-label": "Engines" });
    swap(view.body, live, engines);
    if (!view.may(LIVE)) swap(live, remark("", "To see running requests, sign in with an admin key. This key shows the models that you may use."));
    const refreshed = { seen: null };
    const repeated = [];
    if (view.may(LIVE)) repeated.push(view.repeat(LIVE_MS, async () => {
      refreshed.seen = await view.call(LIVE);
      swap(live, liveParts(view, refreshed.seen));
    }));
    repeated.push(view.repeat(ENGINES_MS, async () => swap(engines, await engineParts(view))));
    await Promise.all(repeated);
  },
};

function sum(organizations, name) {
  return organizations.reduce((total, each) => total + whole(each[name]), 0n);
}

function liveParts(view, { requests = [], organizations = [], requestCount = "0", unresponsiveProcessIds = [] }) {
  const waiting = requests.filter((each) => WAITING.includes(each.phase)).length;
  const isAll = whole(requestCount) <= BigInt(requests.length);
  const speed = organizations.reduce((total, each) => total + (each.tokensPerSecond ?? 0), 0);
  return [
    tiles(tile("Requests", count(requestCount)), tile("Waiting", count(waiting), "", isAll ? "" : `of the oldest ${count(requests.length)}`),
      tile("Output", rate(speed), "tokens/s"), tile("Holds", count(sum(organizations, "holdCount"))),
      tile("Tokens held", count(sum(organizations, "heldTokenCount")))),
    unresponsiveProcessIds.length > 0 && remark("warning", `No answer from process ${unresponsiveProcessIds.join(", ")}: its requests may be shown as they were.`),
    organizations.length > 0 && h("h2", {}, "By organization"),
    organizations.length > 0 && table("Requests by organization", [
      column("Organization", (each) => h("a", { href: `#/limits?org=${encodeURIComponent(each.name)}` }, each.name)),
      column("Requests", (each) => count(each.requestCount), true),
      column("Holds", (each) => count(each.holdCount), true),
      column("Tokens held", (each) => count(each.heldTokenCount), true),
      column("Tokens/s", (each) => rate(each.tokensPerSecond), true),
    ], organizations, { key: (each) => each.organizationId }),
    h("h2", {}, "Requests"),
    table("Running and waiting requests, oldest first", requestColumns(view), requests, {
      empty: "No requests are running.", key: (each) => `${each.projectId}/${each.requestId}`,
    }),
    !isAll && h("p", { class: "note" }, `The oldest ${count(requests.length)} of ${count(requestCount)} are shown.`),
    h("p", { class: "note" }, asOf()),
    command("Command", "weir requests --watch"),
  ];
}

function requestColumns(view) {
  return [
    column("Request", (each) => h("a", { class: "id", href: `#/requests?id=${each.requestId}&project=${encodeURIComponent(`${each.organizationName}/${each.projectName}`)}` }, each.requestId)),
    column("Project", (each) => [`${plain(each.organizationName)}/${plain(each.projectName)}`, h("br"), h("span", { class: "note" }, `key ${plain(each.apiKeyPrefix)}`)]),
    column("Model", (each) => each.model),
    column("Phase", (each) => badge(words(each.phase, "REQUEST_PHASE_") || "unknown", WAITING.includes(each.phase) ? "warning" : "good")),
    column("Age", (each) => wait(secondsOf(each.age)), true),
    column("In", (each) => `${count(each.inputTokenCount)}`, true),
    column("Cached", (each) => count(each.cachedInputTokenCount), true),
    column("Out", (each) => count(each.deliveredTokenCount), true),
    column("Tokens/s", (each) => rate(each.tokensPerSecond), true),
    ...(view.may(KILL) ? [column("Cancel", (each) => killButton(view, each))] : []),
  ];
}

function killButton(view, request) {
  return h("button", { type: "button", class: "danger small", "aria-label": `End request ${request.requestId}`, click: async () => {
    const whose = `${request.organizationName}/${request.projectName}`;
    const reason = await confirm("End this request?",
      `Request ${request.requestId} of ${whose} on ${request.model} ends now. Its delivered tokens are billed, and its client is told that an admin ended it.`,
      "End the request", "Why? The client and the audit log get this text (optional)");
    if (reason === null) return;
    try {
      const { result = "" } = await view.call(KILL, { requestId: request.requestId, project: whose, reason });
      view.say(`Request ${request.requestId}: ${{ RESULT_ENDED: "ended", RESULT_ALREADY_ENDED: "had already ended", RESULT_PENDING: "will end: its process has not confirmed yet" }[result] ?? result}.`);
    } catch (error) {
      view.failed(error, () => swap(view.status, problem(error)));
    }
  } }, "End");
}

async function engineParts(view) {
  const parts = [];
  if (view.may(MODELS)) {
    const { models = [] } = await view.call(MODELS);
    parts.push(h("h2", {}, "Models"), table("Models that you may use", [
      column("Model", (each) => each.name),
      column("Type", (each) => words(each.task, "MODEL_TASK_")),
      column("Engine", (each) => each.engine),
      column("Context", (each) => `${count(each.contextWindowTokens)} tokens`, true),
      column("Ready", (each) => `${each.readyReplicaCount ?? 0} of ${each.replicaCount ?? 0}${each.drainedReplicaCount ? `, ${each.drainedReplicaCount} drained` : ""}`, true),
      column("Per million in / cached / out", (each) => priceText(each), true),
    ], models, { empty: "Your key may not use any model." }));
  }
  if (view.may(REPLICAS)) {
    const { replicas = [], drains = [] } = await view.call(REPLICAS);
    parts.push(h("h2", {}, "Replicas"), table("Engines of models with several replicas", [
      column("Model", (each) => each.model),
      column("Replica", (each) => each.replica),
      column("State", (each) => [badge(words(each.state, "REPLICA_STATE_"), STATE_KINDS[each.state] ?? ""), each.drained && [" ", badge("drained", "warning")], each.reason && h("div", { class: "note" }, each.reason)]),
      column("Requests", (each) => count(each.requestCount), true),
      column("Pending tokens", (each) => count(each.outstandingTokenCount), true),
      column("Process", (each) => each.processName),
    ], replicas, { empty: "No model has several replicas." }));
    for (const each of drains) parts.push(remark("warning", `${plain(each.model)} ${plain(each.replica)} is drained since `, time(each.drainTime), each.reason && `: ${plain(each.reason)}`));
    parts.push(command("Drain a replica", "weir replicas drain MODEL REPLICA"));
  }
  return parts;
}

function priceText({ price, task }) {
  if (!price) return "not set";
  if (task === "MODEL_TASK_EMBED") return `${perMillion(price.embeddingPicosPerToken)} ${price.currencyCode}`;
  const thinking = price.reasoningPicosPerToken === price.outputPicosPerToken ? "" : ` (thinking ${perMillion(price.reasoningPicosPerToken)})`;
  return `${perMillion(price.inputPicosPerToken)} / ${perMillion(price.cachedInputPicosPerToken)} / ${perMillion(price.outputPicosPerToken)}${thinking} ${price.currencyCode}`;
}
