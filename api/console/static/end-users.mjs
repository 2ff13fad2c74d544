// End users of an organization: a list, and the page of one. Addresses have their ids, never their names.

import { meter } from "./chart.mjs";
import { blobOf } from "./client.mjs";
import { badge, choice, column, command, h, id, remark, swap, table, tile, tiles, time } from "./dom.mjs";
import { amount, amountPlaces, count, dimensionWords, limitValue, monthOf, percentOf, plain, quoted, words } from "./format.mjs";
import { limitColumns } from "./limits.mjs";
import { requestTable } from "./requests.mjs";
import { chartChoice, dayAndModelParts, grouped, ownDays, period, summed, usageTable, usageTiles } from "./usage.mjs";
import { problem } from "./view.mjs";

const LIST = "BillingService/ListEndUsers", ONE = "BillingService/GetEndUser", USAGE = "BillingService/GetUsage", ALERTS = "BillingService/ListAlerts";
const PRICES = "BillingService/ListResalePrices", STATEMENT = "BillingService/GetResaleStatement";
const PAGE_SIZE = 50, LATEST = 20, ROWS_MAX = 10000;
const STATES = { END_USER_STATE_ACTIVE: "good", END_USER_STATE_ARCHIVED: "", END_USER_STATE_ERASED: "warning" };
const DELIVERIES = { ALERT_DELIVERY_STATE_DELIVERED: "good", ALERT_DELIVERY_STATE_FAILED: "bad", ALERT_DELIVERY_STATE_PENDING: "warning" };

export const endUsers = {
  id: "end-users",
  title: "End users",
  calls: [LIST],
  scopes: "billing or admin",
  show(view) {
    return view.params.get("user") ? onePage(view) : listPage(view);
  },
};

async function listPage(view) {
  const { ref, name, currency, chooser } = await view.organization();
  const asked = (parameter) => view.params.get(parameter) ?? "";
  const state = Object.hasOwn(STATES, asked("state")) ? asked("state") : "";
  const { endUsers: found = [], nextPageToken = "" } = await view.call(LIST, {
    organization: ref, prefix: asked("prefix"), pageSize: PAGE_SIZE, pageToken: asked("page"), withUsage: true, ...(state && { state }),
  });
  const states = [["", "all"], ...Object.keys(STATES).map((each) => [each, stateWords(each)])];
  const isNarrowed = asked("prefix") || state || asked("page");
  swap(view.body,
    h("div", { class: "controls" }, chooser, choice("State", states, state, (next) => view.go({ state: next, page: "" }))),
    view.search({ prefix: ["Name begins with (upper and lower case differ)", {}] }, "Search"),
    table("End users by name", listColumns(view, currency, found), found,
      { empty: isNarrowed ? "No matching end user." : "No request has named an end user yet: send `end_user`, or OpenAI's `user`.", key: (each) => each.endUserId }),
    h("div", { class: "buttons" },
      asked("page") && h("button", { type: "button", click: () => view.go({ page: "" }) }, "First page"),
      nextPageToken && h("button", { type: "button", click: () => view.go({ page: nextPageToken }) }, "Next page")),
    h("p", { class: "note" }, "Spent and requests are of this month (UTC), before plan, credit and tax. The limit shown is the one of which the largest share is used or held."),
    command("Command", `weir end-user list --org ${name || "ORG"}${asked("prefix") && ` --prefix=${quoted(asked("prefix"))}`}${state && ` --state ${stateWords(state)}`}`));
}

export function listColumns(view, currency, found) {
  const least = amountPlaces(found.map((each) => each.monthCost));
  return [
    column("End user", (each) => h("a", { href: view.address({ user: each.endUserId, prefix: "", state: "", page: "" }) }, nameOf(each))),
    column(`Spent this month, ${currency}`, (each) => amount(each.monthCost, least), true),
    column("Requests", (each) => count(each.monthRequestCount), true),
    column("Limits used", (each) => each.tightestQuota && tightestPart(each.tightestQuota)),
    column("Last used", (each) => each.lastUseDay),
    column("First used", (each) => time(each.createTime)),
    column("State", (each) => stateBadge(each)),
  ];
}

// Name of an end user, which its customer's users may have chosen: apart from the text around it.
export function nameOf({ name, endUserId }) {
  return name ? h("bdi", { class: "name" }, name) : ["(erased) ", id(endUserId)];
}

function tightestPart({ usedValue, heldValue, limitValue: limit, dimension, windowMinutes, model }) {
  return [meter(usedValue, heldValue, limit), h("div", { class: "note" }, `${percentOf(usedValue, heldValue, limit)} % of ${dimensionWords(dimension, windowMinutes)}${model ? ` on ${plain(model)}` : ""}`)];
}

function stateWords(state) {
  return words(state, "END_USER_STATE_");
}

function stateBadge({ state }) {
  return badge(stateWords(state), STATES[state] ?? "");
}

async function onePage(view) {
  const { ref, name: organization, currency } = await view.organization();
  const endUser = view.params.get("user");
  const { request, days, periods, title } = await period(view, false, ref);
  const { what, chooser } = chartChoice(view);
  const month = request.month ?? monthOf(new Date());
  const used = { ...request, organization: ref, endUser, pageSize: ROWS_MAX };
  // A part that fails leaves the others.
  const tried = (name, asked) => view.call(name, asked).catch((error) => ({ error }));
  const [{ endUser: found, quotas = [] }, usage, byKey, latest, alerts, statement] = await Promise.all([
    view.call(ONE, { organization: ref, endUser }),
    view.call(USAGE, { ...used, groupBy: ["USAGE_GROUPING_DAY", "USAGE_GROUPING_MODEL"] }),
    tried(USAGE, { ...used, groupBy: ["USAGE_GROUPING_PROJECT", "USAGE_GROUPING_API_KEY"], largestFirst: true }),
    tried(USAGE, { ...used, groupBy: ["USAGE_GROUPING_REQUEST"], latestFirst: true, pageSize: LATEST }),
    tried(ALERTS, { organization: ref, endUser, pageSize: LATEST }),
    statementOf(view, ref, endUser, month),
  ]);
  const rows = usage.rows ?? [], total = summed(usage.total ? [usage.total] : rows);
  swap(view.body,
    h("p", {}, h("a", { href: view.address({ user: "", month: "", range: "", from: "", to: "", show: "" }) }, "All end users")),
    h("h2", { class: "title" }, nameOf(found), " ", stateBadge(found)),
    h("p", { class: "note" }, "First used ", time(found.createTime), `, last used on ${found.lastUseDay} (UTC). Id `, id(found.endUserId)),
    found.state === "END_USER_STATE_ERASED" && remark("warning", "The name of this end user is erased. Its usage stays in all sums, and its limits have ended."),
    h("div", { class: "controls" }, periods, chooser), ownDays(view),
    usageTiles(total, currency),
    usage.nextPageToken && remark("warning", `These are the first ${count(ROWS_MAX)} days of a model: choose a shorter time for all of them.`),
    h("h2", {}, "Limits"),
    table("Limits of this end user", limitColumns(currency, column("Within", (each) => each.withinName)), quotas, { empty: "No limits apply to this end user.", key: (each) => each.quotaId || `${each.withinId} ${each.dimension} ${each.model}` }),
    dayAndModelParts(rows, total, { days, title, what, currency }),
    h("h2", {}, "By project and key"),
    byKey.error ? problem(byKey.error) : usageTable("Usage by project and key", "Project and key", grouped(byKey.rows ?? [], keyName), total, currency),
    statementPart(view, statement, { organization: ref, endUser, month, currency }),
    h("h2", {}, "Latest requests"),
    latest.error ? problem(latest.error) : requestTable(view, "Latest requests of this end user", latest.rows ?? [], currency, "No requests in this time."),
    h("h2", {}, "Alerts"),
    alerts.error ? problem(alerts.error) : table("Alerts on limits of this end user", alertColumns(), alerts.alerts ?? [], { empty: "No limit of this end user has reached a threshold for alerts.", key: (each) => each.alertId }),
    command("Command", `weir end-user show ${found.endUserId} --org ${organization || "ORG"}`),
    command("Its requests", `weir month show ${month} --org ${organization || "ORG"} --by request --end-user ${found.endUserId}`));
}

function keyName({ projectName, apiKeyName, apiKeyPrefix }) {
  return `${plain(projectName)}: ${plain(apiKeyName)} (${plain(apiKeyPrefix)})`;
}

function alertColumns() {
  return [
    column("Found", (each) => time(each.fireTime)),
    column("Limit of", (each) => [dimensionWords(each.dimension), each.model && ` on ${plain(each.model)}`]),
    column("Within", (each) => each.withinName),
    column("Threshold", (each) => `${count(each.threshold)} %`, true),
    column("Used", (each) => limitValue(each.dimension, each.usedValue), true),
    column("Limit", (each) => limitValue(each.dimension, each.limitValue), true),
    column("Window since", (each) => time(each.windowStartTime)),
    column("Webhook", (each) => each.delivery && badge(words(each.delivery.state, "ALERT_DELIVERY_STATE_"), DELIVERIES[each.delivery.state] ?? "")),
  ];
}

// Statement of a month; null if the organization has never set a resale price.
async function statementOf(view, organization, endUser, month) {
  try {
    const { prices = [] } = await view.call(PRICES, { organization, history: true, pageSize: 1 });
    return prices.length ? await view.call(STATEMENT, { organization, month, endUser }) : null;
  } catch (error) {
    return { error };
  }
}

function statementPart(view, found, { organization, endUser, month, currency }) {
  if (found === null) return null;
  const head = h("h2", {}, `Resale statement of ${month} (UTC)`);
  if (found.error?.httpStatus === 404) return [head, h("p", { class: "empty" }, `No usage in ${month}.`)];
  if (found.error) return [head, problem(found.error)];
  const { statement } = found;
  const saved = async (format, ending) => {
    const { content } = await view.call(STATEMENT, { organization, month, endUser, format: `RESALE_STATEMENT_FORMAT_${format}` });
    return { name: `statement-${month}-${endUser}.${ending}`, content: blobOf(content) };
  };
  return [
    head,
    tiles(tile("To charge", amount(statement.totalRounded), currency, statement.state === "open" ? "so far: the month is open" : "the month is closed"),
      tile("Exact amount", amount(statement.amount), currency), tile("Your cost", amount(statement.cost), currency, "before your plan")),
    h("div", { class: "buttons" }, view.download("PDF for the end user", () => saved("PDF", "pdf")), view.download("CSV with your cost", () => saved("CSV", "csv")), view.download("JSON with your cost", () => saved("JSON", "json"))),
    command("Command", `weir resale statement ${endUser} ${month}`),
  ];
}
