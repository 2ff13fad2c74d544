// End users of an organization: a list, and the page of one. Addresses have their ids, never their
// names.

import type { AlertJson } from "../gen/weir/v1/alerts_pb.js";
import type { EndUserJson } from "../gen/weir/v1/end_users_pb.js";
import type {
  GetResaleStatementResponseJson,
  ResaleStatementFormatJson,
} from "../gen/weir/v1/resale_pb.js";
import type { QuotaStatusJson } from "../gen/weir/v1/types_pb.js";
import type { UsageRowJson } from "../gen/weir/v1/usage_reports_pb.js";
import { CallFailed, blobOf, call } from "../client.js";
import {
  amount,
  amountPlaces,
  count,
  dimensionWords,
  monthOf,
  percentOf,
  plain,
  quoted,
  words,
} from "../format.js";
import {
  Badge,
  Choice,
  Command,
  Download,
  Empty,
  Id,
  Name,
  Note,
  Pages,
  Problem,
  Remark,
  Search,
  Tile,
  Tiles,
  Time,
} from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { Meter } from "../parts/charts.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, tried, useLoaded, useView } from "../view.js";
import type { Caller, Page, Tried, View } from "../view.js";
import { alertColumns } from "./alerts.js";
import { Action } from "../parts/actions.js";
import { limitColumns } from "./limits.js";
import { RequestTable } from "./requests.js";
import {
  DaysAndModels,
  MeasureChoice,
  OtherDays,
  PeriodChoice,
  UsageTable,
  UsageTiles,
  grouped,
  periodOf,
  summed,
} from "./usage.js";

const LIST = "BillingService/ListEndUsers";
const STATEMENT = "BillingService/GetResaleStatement";
const PAGE_SIZE = 50;
const LATEST = 20;
const ROWS_MAX = 10_000;
const STATES: Record<string, Kind> = {
  END_USER_STATE_ACTIVE: "good",
  END_USER_STATE_ARCHIVED: "",
  END_USER_STATE_ERASED: "warning",
};
const t = text.endUsers;

export const endUsers: Page = {
  id: "end-users",
  title: text.pages.endUsers,
  calls: [LIST],
  Show: EndUsers,
};

function EndUsers() {
  const view = useView();
  return view.asked("user") ? <One /> : <List />;
}

function List() {
  const view = useView();
  const state = Object.hasOwn(STATES, view.asked("state"))
    ? (view.asked("state") as keyof typeof STATES)
    : "";
  const prefix = view.asked("prefix");
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const asked = {
      organization: chosen.ref,
      prefix,
      pageSize: PAGE_SIZE,
      pageToken: view.asked("page"),
      withUsage: true,
    };
    return {
      chosen,
      list: await caller(LIST, {
        ...asked,
        ...(state ? { state: state as NonNullable<EndUserJson["state"]> } : {}),
      }),
    };
  });
  const states = [
    ["", t.allStates],
    ...Object.keys(STATES).map((each) => [each, stateWords(each)]),
  ] as [string, string][];
  const isNarrowed = prefix || state || view.asked("page");
  return (
    <Show of={found}>
      {({ chosen, list: { endUsers: rows = [], nextPageToken } }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <Choice
              name={text.state}
              options={states}
              value={state}
              onChange={(next) => view.go({ state: next, page: "" })}
            />
          </div>
          <Search terms={[{ name: "prefix", label: t.prefix }]} act={text.search} />
          <Table
            caption={t.caption}
            columns={listColumns(view, chosen.currency, rows)}
            rows={rows}
            empty={isNarrowed ? t.noMatch : t.none}
            keyOf={(each) => each.endUserId}
          />
          <Pages next={nextPageToken} />
          <Note>{t.listNote}</Note>
          <Command>{`weir end-user list --org ${chosen.name || "ORG"}${prefix && ` --prefix=${quoted(prefix)}`}${state && ` --state ${stateWords(state)}`}`}</Command>
        </>
      )}
    </Show>
  );
}

export function listColumns(view: Pick<View, "address">, currency: string, rows: EndUserJson[]) {
  const least = amountPlaces(rows.map((each) => each.monthCost));
  return [
    column<EndUserJson>(t.endUser, (each) => (
      <a href={view.address({ user: each.endUserId ?? "", prefix: "", state: "", page: "" })}>
        <Called of={each} />
      </a>
    )),
    column<EndUserJson>(t.spent(currency), (each) => amount(each.monthCost, least), true),
    column<EndUserJson>(t.requests, (each) => count(each.monthRequestCount), true),
    column<EndUserJson>(
      t.limitsUsed,
      (each) => each.tightestQuota && <Tightest of={each.tightestQuota} />,
    ),
    column<EndUserJson>(t.lastUsed, (each) => each.lastUseDay),
    column<EndUserJson>(t.firstUsed, (each) => <Time of={each.createTime} />),
    column<EndUserJson>(text.state, (each) => <State of={each} />),
  ];
}

// Name of an end user, which its customer's users may have chosen.
function Called({ of: { name, endUserId } }: { of: EndUserJson }) {
  if (name) return <Name of={name} />;
  return (
    <>
      {t.erased} <Id of={endUserId} />
    </>
  );
}

function Tightest({
  of: { usedValue, heldValue, limitValue: limit, dimension, windowMinutes, model },
}: {
  of: QuotaStatusJson;
}) {
  return (
    <>
      <Meter used={usedValue} held={heldValue} limit={limit} />
      <Note>
        {t.percentOf(
          percentOf(usedValue, heldValue, limit),
          dimensionWords(dimension, windowMinutes),
          model ?? "",
        )}
      </Note>
    </>
  );
}

function stateWords(state: string | undefined): string {
  return words(state, "END_USER_STATE_");
}

function State({ of: { state } }: { of: EndUserJson }) {
  return <Badge kind={STATES[state ?? ""] ?? ""}>{stateWords(state)}</Badge>;
}

function One() {
  const view = useView();
  const endUser = view.asked("user");
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const period = await periodOf(caller, view, chosen.ref, false);
    const month = period.request.month ?? monthOf(new Date());
    const used = { ...period.request, organization: chosen.ref, endUser, pageSize: ROWS_MAX };
    const [one, usage, byKey, latest, alerts, statement] = await Promise.all([
      caller("BillingService/GetEndUser", { organization: chosen.ref, endUser }),
      caller("BillingService/GetUsage", {
        ...used,
        groupBy: ["USAGE_GROUPING_DAY", "USAGE_GROUPING_MODEL"],
      }),
      tried(
        caller("BillingService/GetUsage", {
          ...used,
          groupBy: ["USAGE_GROUPING_PROJECT", "USAGE_GROUPING_API_KEY"],
          largestFirst: true,
        }),
      ),
      tried(
        caller("BillingService/GetUsage", {
          ...used,
          groupBy: ["USAGE_GROUPING_REQUEST"],
          latestFirst: true,
          pageSize: LATEST,
        }),
      ),
      tried(
        caller("BillingService/ListAlerts", {
          organization: chosen.ref,
          endUser,
          pageSize: LATEST,
        }),
      ),
      statementOf(caller, chosen.ref, endUser, month),
    ]);
    return { chosen, period, month, one, usage, byKey, latest, alerts, statement };
  });
  return (
    <Show of={found}>
      {({
        chosen,
        period,
        month,
        one: { endUser: user = {}, quotas = [] },
        usage,
        byKey,
        latest,
        alerts,
        statement,
      }) => {
        const rows = usage.rows ?? [];
        const total = summed(usage.total ? [usage.total] : rows);
        return (
          <>
            <p>
              <a
                href={view.address({
                  user: "",
                  month: "",
                  range: "",
                  from: "",
                  to: "",
                  show: "",
                })}
              >
                {t.all}
              </a>
            </p>
            <h2 className="title">
              <Called of={user} /> <State of={user} />
            </h2>
            <Note>
              {t.firstUsed} <Time of={user.createTime} />
              {t.lastUsedOn(user.lastUseDay ?? "")} <Id of={user.endUserId} />
            </Note>
            {user.state !== "END_USER_STATE_ERASED" && (
              <div className="buttons">
                <Action
                  call="AdminService/EraseEndUser"
                  label={t.erase}
                  title={t.eraseTitle(user.name ?? "")}
                  explanation={t.eraseExplanation}
                  act={t.erase}
                  isDanger
                  request={() => ({ organization: chosen.ref, endUser: user.name ?? "" })}
                  done={({ limitCount, labelledRequestCount }) =>
                    t.erasedWith(count(limitCount), count(labelledRequestCount))
                  }
                  changed={found.reload}
                />
              </div>
            )}
            {user.state === "END_USER_STATE_ERASED" && <Remark kind="warning">{t.isErased}</Remark>}
            <div className="controls">
              <PeriodChoice of={period} />
              <MeasureChoice />
            </div>
            <OtherDays />
            <UsageTiles total={total} currency={chosen.currency} />
            {usage.nextPageToken && (
              <Remark kind="warning">{text.usage.first(count(ROWS_MAX))}</Remark>
            )}
            <h2>{t.limits}</h2>
            <Table
              caption={t.limitsOf}
              columns={limitColumns(
                chosen.currency,
                column<QuotaStatusJson>(t.within, (each) => each.withinName),
              )}
              rows={quotas}
              empty={t.noLimits}
              keyOf={(each) => each.quotaId || `${each.withinId} ${each.dimension} ${each.model}`}
            />
            <DaysAndModels rows={rows} total={total} period={period} currency={chosen.currency} />
            <h2>{t.byKey}</h2>
            {"error" in byKey ? (
              <Problem of={byKey.error} />
            ) : (
              <UsageTable
                caption={t.usageByKey}
                head={t.projectAndKey}
                rows={grouped(byKey.value.rows ?? [], keyName)}
                total={total}
                currency={chosen.currency}
              />
            )}
            <Statement
              of={statement}
              organization={chosen.ref}
              endUser={endUser}
              month={month}
              currency={chosen.currency}
            />
            <h2>{t.latest}</h2>
            {"error" in latest ? (
              <Problem of={latest.error} />
            ) : (
              <RequestTable
                caption={t.latestOf}
                rows={latest.value.rows ?? []}
                currency={chosen.currency}
                empty={t.noRequests}
              />
            )}
            <h2>{t.alerts}</h2>
            {"error" in alerts ? (
              <Problem of={alerts.error} />
            ) : (
              <Table
                caption={t.alertsOf}
                columns={alertColumns()}
                rows={alerts.value.alerts}
                empty={t.noAlerts}
                keyOf={(each: AlertJson) => each.alertId}
              />
            )}
            <Command>{`weir end-user show ${user.endUserId} --org ${chosen.name || "ORG"}`}</Command>
            <Command
              what={t.itsRequests}
            >{`weir month show ${month} --org ${chosen.name || "ORG"} --by request --end-user ${user.endUserId}`}</Command>
          </>
        );
      }}
    </Show>
  );
}

function keyName({ projectName, apiKeyName, apiKeyPrefix }: UsageRowJson): string {
  return `${plain(projectName)}: ${plain(apiKeyName)} (${plain(apiKeyPrefix)})`;
}

// Statement of a month; null if the organization has never set a resale price.
async function statementOf(
  caller: Caller,
  organization: string,
  endUser: string,
  month: string,
): Promise<Tried<GetResaleStatementResponseJson> | null> {
  const prices = await tried(
    caller("BillingService/ListResalePrices", { organization, history: true, pageSize: 1 }),
  );
  if ("error" in prices) return prices;
  return prices.value.prices?.length
    ? tried(caller(STATEMENT, { organization, month, endUser }))
    : null;
}

interface Stated {
  of: Tried<GetResaleStatementResponseJson> | null;
  organization: string;
  endUser: string;
  month: string;
  currency: string;
}

function Statement({ of, organization, endUser, month, currency }: Stated) {
  if (of === null) return null;
  const head = <h2>{t.statement(month)}</h2>;
  if ("error" in of) {
    const isUnused = of.error instanceof CallFailed && of.error.httpStatus === 404;
    return (
      <>
        {head}
        {isUnused ? <Empty>{t.noUsage(month)}</Empty> : <Problem of={of.error} />}
      </>
    );
  }
  const { statement = {} } = of.value;
  const saved = async (format: ResaleStatementFormatJson, ending: string) => {
    const { content } = await call(STATEMENT, { organization, month, endUser, format });
    return { name: `statement-${month}-${endUser}.${ending}`, content: blobOf(content) };
  };
  return (
    <>
      {head}
      <Tiles>
        <Tile
          name={t.toCharge}
          value={amount(statement.totalRounded)}
          unit={currency}
          note={statement.state === "open" ? t.soFar : t.isClosed}
        />
        <Tile name={t.exact} value={amount(statement.amount)} unit={currency} />
        <Tile
          name={t.yourCost}
          value={amount(statement.cost)}
          unit={currency}
          note={t.beforePlan}
        />
      </Tiles>
      <div className="buttons">
        <Download fetched={() => saved("RESALE_STATEMENT_FORMAT_PDF", "pdf")}>{t.pdf}</Download>
        <Download fetched={() => saved("RESALE_STATEMENT_FORMAT_CSV", "csv")}>{t.csv}</Download>
        <Download fetched={() => saved("RESALE_STATEMENT_FORMAT_JSON", "json")}>{t.json}</Download>
      </div>
      <Command>{`weir resale statement ${endUser} ${month}`}</Command>
    </>
  );
}
