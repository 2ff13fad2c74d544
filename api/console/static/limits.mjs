// Limits with their used, held and remaining amounts, reset times and owners.

import { badge, choice, column, command, h, swap, table, time } from "./dom.mjs";
import { meter } from "./chart.mjs";
import { count, dimensionWords, isMoney, limitValue, plain, secondsOf, wait, words } from "./format.mjs";
import { asOf } from "./view.mjs";

const REFRESH_MS = 5000;
const LIST = "AdminService/ListQuotas", OWN = "InferenceService/GetQuota", KEYS = "AdminService/ListApiKeys";

export const limits = {
  id: "limits",
  title: "Limits",
  calls: [LIST, OWN],
  scopes: "admin or inference",
  async show(view) {
    const controls = h("div", { class: "controls" }), shown = h("section", { "aria-label": "Limits" });
    let load, share, currency = view.session.currencyCode, whose = "this key", terminal = "weir quota show";
    if (view.may(LIST)) {
      const { ref, name, currency: billed, weight, chooser } = await view.organization();
      currency = billed;
      share = weight && `Weight of ${name} in the fair queue: ${Number(weight) / 1000}. Change it with weir org weight ${name} WEIGHT.`;
      const { apiKeys = [] } = await view.call(KEYS, { organization: ref });
      const good = apiKeys.filter((each) => !each.revokeTime);
      const key = good.find((each) => each.prefix === view.params.get("key"))?.prefix ?? "";
      const options = [["", "all limits of the organization"], ...good.map((each) => [each.prefix, `${each.prefix} (${each.name})`])];
      swap(controls, chooser, choice("Limits of a key", options, key, (chosen) => view.go({ key: chosen })));
      load = () => view.call(LIST, key ? { apiKey: key } : { organization: ref });
      whose = key ? `key ${key}` : name;
      terminal = key ? `weir quota list --key ${key}` : `weir quota list --org ${name}`;
    } else {
      load = () => view.call(OWN);
    }
    swap(view.body, controls, shown, command("Set a limit", "weir quota set tokens-per-month 1000000 --org ORG"), command("Command", terminal));
    await view.repeat(REFRESH_MS, async () => {
      const { quotas = [] } = await load();
      swap(shown, table(`Limits of ${whose}`, limitColumns(currency), quotas, { empty: "No limits are set.", key: (each) => each.quotaId }), share && h("p", { class: "note" }, share), h("p", { class: "note" }, asOf()));
    });
  },
};

const owner = column("Set on", (each) => [
  each.forNewKeys ? "new keys of " : "", eachOf(each), words(each.subject, "QUOTA_SUBJECT_"), h("br"),
  h("span", { class: "note" }, h("bdi", { class: "name" }, each.subjectName ?? ""), each.withinName && ` of ${plain(each.withinName)}`)]);

// A selector limits nothing itself: it has terms, and nothing used.
const counted = (each, shown) => (each.forEach ? "" : shown());

// Columns of limits, with the one that says whom they concern.
export const limitColumns = (currency, whose = owner) => [
  column("Limit of", (each) => [dimensionWords(each.dimension, each.windowMinutes), each.model ? ` on ${each.model}` : "", remarksOf(each)]),
  whose,
  column("Usage", (each) => counted(each, () => meter(each.usedValue, each.heldValue, each.limitValue))),
  column("Used", (each) => counted(each, () => limitValue(each.dimension, each.usedValue)), true),
  column("Held", (each) => counted(each, () => limitValue(each.dimension, each.heldValue)), true),
  column("Left", (each) => counted(each, () => limitValue(each.dimension, each.remainingValue)), true),
  column("Limit", (each) => limitValue(each.dimension, each.limitValue), true),
  column("Unit", (each) => unitOf(each.dimension, currency)),
  column("Resets", (each) => counted(each, () => (each.resetTime ? [`in ${wait(secondsOf(each.resetDelay))}`, h("div", { class: "note" }, time(each.resetTime))] : /LIFETIME|CREDIT/.test(each.dimension) ? "never" : "as requests end"))),
];

function unitOf(dimension, currency) {
  if (isMoney(dimension)) return currency;
  return /REQUESTS/.test(dimension) ? "requests" : "tokens";
}

// What a selector gives its limit to, such as "each key of group free of ".
function eachOf(quota) {
  if (!quota.forEach) return "";
  const [kind, ...name] = quota.forEach.split(":");
  if (kind === "end_user") return "each end user of ";
  return kind === "key" ? `each key of group ${name.join(":")} of ` : `each ${kind} ${name.join(":")} of `;
}

function remarksOf(each) {
  const remarks = [];
  if (each.group) remarks.push(badge(`by group ${each.group}`));
  if (each.binding) remarks.push(badge("most restrictive", "warning"));
  if (each.narrowedByQuotaId) remarks.push(badge("ineffective: a higher-level limit is lower"));
  if (each.selectorId) remarks.push(badge("by selector"));
  if (!each.enforced) remarks.push(badge(`shadow mode, would have refused ${count(each.wouldRefuseCount)}`));
  const weights = [each.inputWeightMilli, each.cachedInputWeightMilli, each.outputWeightMilli].map((weight) => Number(weight ?? 0));
  if (weights.some((weight) => weight) && new Set([...weights, 1000]).size > 1) {
    remarks.push(h("div", { class: "note" }, `weights ${weights.map((weight) => weight / 1000).join(" / ")} (in / cached / out)`));
  }
  if (each.overrideEndTime) {
    remarks.push(h("div", { class: "note" }, `temporary override of ${limitValue(each.dimension, each.baseLimitValue)} until `, time(each.overrideEndTime), `: ${each.overrideReason ?? ""}`));
  }
  return remarks.length ? h("div", { class: "badges" }, remarks) : null;
}
