// All months of an organization with what fits their state: close, verify, refund; and payments.

import { useState } from "react";
import type {
  AdjustmentJson,
  InvoicePaymentJson,
  MonthJson,
  ObstacleJson,
  VerifyMonthResponseJson,
} from "../gen/weir/v1/months_pb.js";
import type { GetMonthReportResponseJson } from "../gen/weir/v1/billing_service_pb.js";
import { call } from "../client.js";
import { count, money, monthOf, words } from "../format.js";
import { Action } from "../parts/actions.js";
import type { Asked } from "../parts/actions.js";
import { Badge, Button, Id, Note, Problem, Remark, Time } from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, tried, useLoaded, useView } from "../view.js";
import type { Tried } from "../view.js";

const CLOSE = "BillingService/CloseMonth";
const VERIFY = "BillingService/VerifyMonth";
const PAYMENT_KINDS: Record<string, Kind> = {
  PAYMENT_STATE_PAID: "good",
  PAYMENT_STATE_FAILED: "bad",
  PAYMENT_STATE_OVERDUE: "bad",
  PAYMENT_STATE_UNCOLLECTIBLE: "bad",
};
const t = text.months;

type Report = GetMonthReportResponseJson;

// What can be done with the month that is shown: one of the two, or nothing before its end.
export function MonthActions({
  organization,
  month,
  report,
  corrections,
  reload,
}: {
  organization: string;
  month: string;
  report: Report;
  corrections: AdjustmentJson[];
  reload: () => void;
}) {
  const view = useView();
  if (report.state === "MONTH_STATE_CLOSED")
    return view.may(VERIFY) ? <Verify organization={organization} month={month} /> : null;
  if (!view.may(CLOSE)) return null;
  if (month >= monthOf(new Date())) return <Note>{t.notOver(month)}</Note>;
  return (
    <Close
      organization={organization}
      month={month}
      report={report}
      corrections={corrections}
      reload={reload}
    />
  );
}

// Fields that a close needs for its obstacles only.
export function closingFields(obstacles: ObstacleJson[], corrections: AdjustmentJson[]): Asked[] {
  const kinds = new Set(obstacles.map((each) => each.kind));
  const approved = corrections.filter(
    (each) => each.state === "ADJUSTMENT_STATE_APPROVED" && !each.invoiceNumber,
  );
  return [
    ...(kinds.has("REQUESTS_RUNNING")
      ? [
          {
            name: "leave_running",
            label: t.leaveRunning,
            help: t.leaveHelp,
            type: "check" as const,
          },
        ]
      : []),
    ...(kinds.has("MONTH_BEFORE_FIRST")
      ? [{ name: "before_first", label: t.beforeFirst, help: t.beforeHelp, type: "check" as const }]
      : []),
    ...(kinds.has("USAGE_MISSTATED")
      ? [
          {
            name: "correcting_adjustment_id",
            label: t.correctedBy,
            help: t.correctedHelp,
            options: [
              ["", text.none] as [string, string],
              ...approved.map((each): [string, string] => [
                each.adjustmentId ?? "",
                `${money(each.amount)}: ${each.reason}`,
              ]),
            ],
          },
        ]
      : []),
  ];
}

function Close({
  organization,
  month,
  report,
  corrections,
  reload,
}: {
  organization: string;
  month: string;
  report: Report;
  corrections: AdjustmentJson[];
  reload: () => void;
}) {
  const [obstacles, setObstacles] = useState<ObstacleJson[]>([]);
  const name = report.organizationName ?? "";
  return (
    <div className="buttons">
      <Action
        call={CLOSE}
        label={report.state === "MONTH_STATE_CLOSING" ? t.goOn : t.close}
        about={month}
        title={t.closeTitle(name, month)}
        explanation={<Frozen organization={organization} month={month} found={setObstacles} />}
        act={t.close}
        isDanger
        fields={closingFields(obstacles, corrections)}
        request={(values) => ({
          organization,
          month,
          leaveRunning: values["leave_running"] === "true",
          beforeFirst: values["before_first"] === "true",
          correctingAdjustmentId: values["correcting_adjustment_id"] ?? "",
        })}
        done={({ month: closed, alreadyClosed }) =>
          t.isClosed(
            month,
            closed?.invoiceNumber ? `${closed.invoiceNumber}, ${money(closed.total)}` : "",
            alreadyClosed ?? false,
          )
        }
        changed={reload}
      />
    </div>
  );
}

// What a close would freeze, and what prevents it: a dry run, which changes nothing.
function Frozen({
  organization,
  month,
  found,
}: {
  organization: string;
  month: string;
  found: (obstacles: ObstacleJson[]) => void;
}) {
  const dry = useLoaded(
    async (caller) => {
      const asked = { organization, month };
      const { obstacles = [] } = await caller(CLOSE, { ...asked, validateOnly: true });
      found(obstacles);
      // The dry run has rated the usage that waited for it.
      return { obstacles, report: await caller("BillingService/GetMonthReport", asked) };
    },
    [organization, month],
  );
  return (
    <>
      <p>{t.closeExplanation}</p>
      <Show of={dry}>
        {({ obstacles, report }) => (
          <>
            <ul className="effects">
              {frozenBy(report).map((each) => (
                <li key={each}>{each}</li>
              ))}
            </ul>
            {obstacles.length === 0 ? (
              <Remark kind="good">{t.noObstacle}</Remark>
            ) : (
              <>
                <p>{t.obstacles}</p>
                <ul className="effects">
                  {obstacles.map((each, index) => (
                    <li key={index}>{each.description}</li>
                  ))}
                </ul>
              </>
            )}
          </>
        )}
      </Show>
    </>
  );
}

export function frozenBy(report: Report): string[] {
  const { lines = [], charges = [], unratedEventCount } = report;
  return [
    t.freezesTotal(money(report.totalRounded)),
    t.freezesLines(count(lines.length), count(charges.length)),
    t.freezesRequests(count(report.requestCounts?.totalCount)),
    ...(unratedEventCount ? [t.unrated(count(unratedEventCount))] : []),
  ];
}

function Verify({ organization, month }: { organization: string; month: string }) {
  const [found, setFound] = useState<Tried<VerifyMonthResponseJson> | null>(null);
  const [isBusy, setBusy] = useState(false);
  const verify = async () => {
    setBusy(true);
    setFound(await tried(call(VERIFY, { organization, month })));
    setBusy(false);
  };
  return (
    <>
      <div className="buttons">
        <Button isBusy={isBusy} onPress={() => void verify()}>
          {t.verify}
        </Button>
      </div>
      <div role="status">{found && <Verified of={found} month={month} />}</div>
    </>
  );
}

function Verified({ of, month }: { of: Tried<VerifyMonthResponseJson>; month: string }) {
  if ("error" in of) return <Problem of={of.error} />;
  if (of.value.reproduced) return <Remark kind="good">{t.reproduced(month)}</Remark>;
  return (
    <Remark kind="bad">
      {text.reconciliation.notReproduced((of.value.differences ?? []).join("; "))}
    </Remark>
  );
}

// Every month, the latest first.
export function AllMonths({ of, organization }: { of: MonthJson[]; organization: string }) {
  return (
    <>
      <h2>{t.all}</h2>
      <Table
        caption={t.all}
        columns={[
          column<MonthJson>(t.month, (each) => (
            <a href={addressOf("month", { month: each.month, org: organization })}>{each.month}</a>
          )),
          column<MonthJson>(text.state, (each) => (
            <Badge kind={each.state === "MONTH_STATE_CLOSED" ? "good" : "warning"}>
              {words(each.state, "MONTH_STATE_")}
            </Badge>
          )),
          column<MonthJson>(t.closed, (each) => each.closeTime && <Time of={each.closeTime} />),
          column<MonthJson>(t.by, (each) => each.closedBy && <Id of={each.closedBy} />),
          column<MonthJson>(
            text.bill.invoice,
            (each) =>
              each.invoiceNumber || (each.state === "MONTH_STATE_CLOSED" ? t.nothingToInvoice : ""),
          ),
          column<MonthJson>(text.bill.total, (each) => (each.total ? money(each.total) : ""), true),
          column<MonthJson>(t.payment, (each) =>
            each.payments?.map((payment, index) => <PaymentState key={index} of={payment} />),
          ),
        ]}
        rows={of}
        empty={t.none}
        keyOf={(each) => each.month}
      />
    </>
  );
}

function PaymentState({ of: { state } }: { of: InvoicePaymentJson }) {
  return <Badge kind={PAYMENT_KINDS[state ?? ""] ?? ""}>{words(state, "PAYMENT_STATE_")}</Badge>;
}

// Payments of an invoice, as Stripe last reported them.
export function Payments({ of }: { of: InvoicePaymentJson[] }) {
  return (
    <>
      <h2>{t.payments}</h2>
      <Table
        caption={t.payments}
        columns={[
          column<InvoicePaymentJson>(t.number, (each) => (
            <Id of={each.stripeNumber || each.stripeInvoiceId} />
          )),
          column<InvoicePaymentJson>(text.state, (each) => <PaymentState of={each} />),
          column<InvoicePaymentJson>(t.due, (each) => money(each.amountDue), true),
          column<InvoicePaymentJson>(t.paid, (each) => money(each.amountPaid), true),
          column<InvoicePaymentJson>(
            t.paidAt,
            (each) => each.payTime && <Time of={each.payTime} />,
          ),
          column<InvoicePaymentJson>(
            t.failedAt,
            (each) => each.failureTime && <Time of={each.failureTime} />,
          ),
          column<InvoicePaymentJson>(t.page, (each) =>
            /^https:\/\//.test(each.hostedUrl ?? "") ? (
              <a href={each.hostedUrl} rel="noreferrer" target="_blank">
                {t.open}
              </a>
            ) : (
              ""
            ),
          ),
        ]}
        rows={of}
        keyOf={(each) => each.stripeInvoiceId}
      />
    </>
  );
}
