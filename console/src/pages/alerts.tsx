// Alerts of an organization with their deliveries, and its webhook.

import type { AlertJson, AlertWebhookJson } from "../gen/weir/v1/alerts_pb.js";
import { count, dimensionWords, limitValue, money, words } from "../format.js";
import { Action } from "../parts/actions.js";
import { Badge, Command, Name, Note, Pages, Problem, Time } from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, tried, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const LIST = "BillingService/ListAlerts";
const WEBHOOKS = "AdminService/ListAlertWebhooks";
const PAGE_SIZE = 50;
const DELIVERIES: Record<string, Kind> = {
  ALERT_DELIVERY_STATE_DELIVERED: "good",
  ALERT_DELIVERY_STATE_FAILED: "bad",
  ALERT_DELIVERY_STATE_PENDING: "warning",
};
const t = text.alerts;

export const alerts: Page = {
  id: "alerts",
  title: text.pages.alerts,
  calls: [LIST, WEBHOOKS],
  Show: Alerts,
};

function Alerts() {
  const view = useView();
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const organization = chosen.ref;
    const [webhooks, list] = await Promise.all([
      view.may(WEBHOOKS) ? tried(caller(WEBHOOKS, { organization })) : null,
      view.may(LIST)
        ? tried(
            caller(LIST, {
              organization,
              pageSize: PAGE_SIZE,
              pageToken: view.asked("page"),
            }),
          )
        : null,
    ]);
    return { chosen, webhooks, list };
  });
  return (
    <Show of={found}>
      {({ chosen, webhooks, list }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <SetWebhook organization={chosen.ref} reload={found.reload} />
          </div>
          {webhooks && (
            <>
              <h2>{t.webhook}</h2>
              {"error" in webhooks ? (
                <Problem of={webhooks.error} />
              ) : (
                <Table
                  caption={t.webhook}
                  columns={webhookColumns(found.reload)}
                  rows={webhooks.value.webhooks}
                  empty={t.noWebhook}
                  keyOf={(each) => each.organizationId}
                />
              )}
            </>
          )}
          {list && (
            <>
              <h2>{t.alerts}</h2>
              {"error" in list ? (
                <Problem of={list.error} />
              ) : (
                <>
                  <Table
                    caption={t.alerts}
                    columns={[
                      column<AlertJson>(t.kind, (each) => each.kind),
                      column<AlertJson>(t.about, (each) => <About of={each} />),
                      ...alertColumns(),
                    ]}
                    rows={list.value.alerts}
                    empty={t.none}
                    keyOf={(each) => each.alertId}
                  />
                  <Pages next={list.value.nextPageToken} />
                </>
              )}
            </>
          )}
          <Command>{`weir alerts --org ${chosen.name || "ORG"}`}</Command>
        </>
      )}
    </Show>
  );
}

function About({ of: { subjectName, key, invoice } }: { of: AlertJson }) {
  if (key) {
    return (
      <>
        <Name of={key.name} />
        <Note>
          {t.keyChanged(key.prefix ?? "", (key.changed ?? []).join(", "), key.changedBy ?? "")}
        </Note>
      </>
    );
  }
  if (invoice)
    return t.invoice(
      invoice.stripeNumber || invoice.stripeInvoiceId || "",
      money(invoice.amountDue),
    );
  return <Name of={subjectName} />;
}

export function alertColumns() {
  return [
    column<AlertJson>(t.found, (each) => <Time of={each.fireTime} />),
    column<AlertJson>(
      t.limitOf,
      (each) =>
        each.dimension &&
        each.quotaId &&
        `${dimensionWords(each.dimension)}${each.model ? ` ${t.on(each.model)}` : ""}`,
    ),
    column<AlertJson>(t.within, (each) => each.withinName),
    column<AlertJson>(t.threshold, (each) => each.threshold && `${count(each.threshold)} %`, true),
    column<AlertJson>(
      t.used,
      (each) => each.quotaId && limitValue(each.dimension, each.usedValue),
      true,
    ),
    column<AlertJson>(
      t.limit,
      (each) => each.quotaId && limitValue(each.dimension, each.limitValue),
      true,
    ),
    column<AlertJson>(
      t.windowSince,
      (each) => each.windowStartTime && <Time of={each.windowStartTime} />,
    ),
    column<AlertJson>(t.delivery, (each) => each.delivery && <Delivery of={each.delivery} />),
  ];
}

function Delivery({
  of: { state, attemptCount = 0, lastError },
}: {
  of: NonNullable<AlertJson["delivery"]>;
}) {
  return (
    <>
      <Badge kind={DELIVERIES[state ?? ""] ?? ""}>{words(state, "ALERT_DELIVERY_STATE_")}</Badge>
      {attemptCount > 1 && <Note>{t.attempts(attemptCount)}</Note>}
      {lastError && <Note>{lastError}</Note>}
    </>
  );
}

const webhookColumns = (reload: () => void) => [
  column<AlertWebhookJson>(t.url, (each) => <span className="id">{each.url}</span>),
  column<AlertWebhookJson>(t.since, (each) => <Time of={each.createTime} />),
  column<AlertWebhookJson>(t.pending, (each) => count(each.pendingCount), true),
  column<AlertWebhookJson>(text.state, (each) => (
    <>
      <Badge kind={each.failureCount ? "bad" : "good"}>
        {each.failureCount ? t.failures(each.failureCount) : t.works}
      </Badge>
      {each.lastError && <Note>{each.lastError}</Note>}
      {each.pauseEndTime && (
        <Note>
          {t.pausedUntil} <Time of={each.pauseEndTime} />
        </Note>
      )}
    </>
  )),
  column<AlertWebhookJson>(text.change, (each) => <WebhookChanges of={each} reload={reload} />),
];

function SetWebhook({ organization, reload }: { organization: string; reload: () => void }) {
  return (
    <Action
      call="AdminService/SetAlertWebhook"
      label={t.set}
      title={t.set}
      explanation={t.setExplanation}
      act={text.save}
      isPrimary
      fields={[
        {
          name: "url",
          label: t.url,
          type: "url",
          placeholder: "https://example.com/weir-alerts",
          isRequired: true,
        },
      ]}
      request={({ url = "" }, requestId) => ({ organization, url, requestId })}
      done={({ webhook, secret = "" }) => ({ message: t.isSet(webhook?.url ?? ""), secret })}
      changed={reload}
    />
  );
}

function WebhookChanges({
  of: { organizationId: organization = "", url = "" },
  reload,
}: {
  of: AlertWebhookJson;
  reload: () => void;
}) {
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/TestAlertWebhook"
        label={t.test}
        about={url}
        title={t.testTitle}
        explanation={t.testExplanation}
        act={t.test}
        request={(_values, requestId) => ({ organization, requestId })}
        done={() => t.tested}
        changed={reload}
      />
      <Action
        call="AdminService/DeleteAlertWebhook"
        label={t.remove}
        about={url}
        title={t.removeTitle}
        explanation={t.removeExplanation(url)}
        act={t.remove}
        isDanger
        request={() => ({ organization })}
        done={() => t.removed}
        changed={reload}
      />
    </div>
  );
}
