// Reconciliation of a month from usage to invoice and export, with all differences. The server
// compares.

import type { ReactNode } from "react";
import type { MonthJson, VerifyMonthResponseJson } from "../gen/weir/v1/months_pb.js";
import type { GetReconciliationResponseJson } from "../gen/weir/v1/reconciliation_pb.js";
import type { GetReceiptMonthResponseJson } from "../gen/weir/v1/receipt_service_pb.js";
import { count, money, wait, words } from "../format.js";
import { Badge, Command, Id, Note, Remark, Time } from "../parts/basics.js";
import { MonthChoice, OrganizationChoice, monthChosen, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const STAGES = "BillingService/GetReconciliation";
const t = text.reconciliation;

type Sum = NonNullable<GetReconciliationResponseJson["sums"]>[number];
type Difference = NonNullable<GetReconciliationResponseJson["differences"]>[number];

export const reconciliation: Page = {
  id: "reconciliation",
  title: text.pages.reconciliation,
  calls: [STAGES],
  Show: Reconciliation,
};

function Reconciliation() {
  const view = useView();
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const months = await monthChosen(caller, view, chosen.ref);
    const asked = { organization: chosen.ref, month: months.month };
    const entry = months.months.find((each) => each.month === months.month);
    const isClosed = entry?.state === "MONTH_STATE_CLOSED";
    const [stages, receipts, verified] = await Promise.all([
      caller(STAGES, asked),
      caller("ReceiptService/GetReceiptMonth", asked),
      isClosed ? caller("BillingService/VerifyMonth", asked) : null,
    ]);
    return { chosen, months, entry, stages, receipts, verified };
  });
  return (
    <Show of={found}>
      {({ chosen, months, entry, stages, receipts, verified }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <MonthChoice of={months} />
          </div>
          <Exceptions
            differences={stages.differences ?? []}
            verified={verified}
            month={months.month}
          />
          <h2>{text.bill.head(stages.organizationName ?? "", months.month)}</h2>
          <Table
            caption={t.stages}
            columns={stageColumns(stages.exported ?? false)}
            rows={stages.sums}
            empty={t.noUsage}
            isGrid
          />
          <Note>
            {stages.exported ? (
              <>
                {t.due} <Time of={stages.dueTime} />
                {t.dueRest}
              </>
            ) : (
              t.exportOff
            )}
          </Note>
          <h2>{t.documents}</h2>
          <Documents entry={entry} verified={verified} receipts={receipts} />
          <Command
            what={t.stripeCommand}
          >{`weir reconcile ${months.month} --org ${stages.organizationName ?? ""}`}</Command>
          <Command what={t.fsckCommand}>weir fsck</Command>
        </>
      )}
    </Show>
  );
}

function Exceptions({
  differences,
  verified,
  month,
}: {
  differences: Difference[];
  verified: VerifyMonthResponseJson | null;
  month: string;
}) {
  const isBroken = verified && !verified.reproduced;
  if (differences.length === 0 && !isBroken) return <Remark kind="good">{t.agree(month)}</Remark>;
  return (
    <>
      {differences.map((each, index) => (
        <Remark key={index} kind="bad">
          <strong>{each.stage}: </strong>
          {headline(each)}.
          <br />
          {t.remedy(each.remedy ?? "")}
        </Remark>
      ))}
      {isBroken && (
        <Remark kind="bad">{t.notReproduced((verified.differences ?? []).join("; "))}</Remark>
      )}
    </>
  );
}

function headline({
  model,
  priceVersion,
  tokenKind,
  tokenCount,
  amount,
  sinceTime,
  detail,
}: Difference): string {
  const where = [model, priceVersion && t.version(priceVersion), words(tokenKind)]
    .filter(Boolean)
    .join(" ");
  const what = [tokenCount && t.tokenCount(count(tokenCount)), amount && money(amount)]
    .filter(Boolean)
    .join(", ");
  const age = sinceTime && t.since(wait((Date.now() - Date.parse(sinceTime)) / 1000));
  return [where, [what, age].filter(Boolean).join(", "), detail].filter(Boolean).join(": ");
}

function stageColumns(isExported: boolean) {
  const figure = (head: string, name: keyof Sum) =>
    column<Sum>(head, (each) => count(each[name] as string | undefined), true);
  return [
    column<Sum>(
      text.model,
      (each) => `${each.model}${each.tier === "batch" ? ` ${text.bill.batch}` : ""}`,
    ),
    column<Sum>(text.bill.price, (each) => `v${each.priceVersion}`),
    column<Sum>(text.bill.tokens, (each) => words(each.tokenKind)),
    figure(t.used, "usedTokenCount"),
    figure(t.posted, "postedTokenCount"),
    figure(t.billed, "billedTokenCount"),
    figure(t.invoiced, "invoicedTokenCount"),
    ...(isExported
      ? [
          figure(t.dueCount, "dueTokenCount"),
          figure(t.batched, "batchedTokenCount"),
          figure(t.delivered, "deliveredTokenCount"),
        ]
      : []),
  ];
}

interface Document {
  name: string;
  content: ReactNode;
  digest: string | undefined;
}

function Documents({
  entry,
  verified,
  receipts,
}: {
  entry: MonthJson | undefined;
  verified: VerifyMonthResponseJson | null;
  receipts: GetReceiptMonthResponseJson;
}) {
  const missing = receipts.missingReceiptCount
    ? t.missingReceipts(count(receipts.missingReceiptCount))
    : "";
  const rows: Document[] = [
    ...(entry?.invoiceNumber
      ? [
          {
            name: text.bill.invoice,
            content: t.invoiceOver(entry.invoiceNumber, money(entry.total)),
            digest: entry.pdfSha256,
          },
        ]
      : []),
    ...(verified
      ? [
          {
            name: t.closingReport,
            content: (
              <Badge kind={verified.reproduced ? "good" : "bad"}>
                {verified.reproduced ? t.reproduced : t.different}
              </Badge>
            ),
            digest: verified.month?.jsonSha256,
          },
        ]
      : []),
    {
      name: t.receipts,
      content: `${count(receipts.receiptCount)}${missing}`,
      digest: entry?.receiptsRoot,
    },
  ];
  const columns = [
    column<Document>(t.document, (each) => each.name),
    column<Document>(t.content, (each) => each.content),
    column<Document>(t.digest, (each) => <Id of={each.digest} />),
  ];
  return <Table caption={t.documents} columns={columns} rows={rows} keyOf={(each) => each.name} />;
}
