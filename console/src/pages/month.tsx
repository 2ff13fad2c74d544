// Month report: preliminary, or as closed. Amounts are exact; the server adds them up.

import type { ReactNode } from "react";
import type { GetMonthReportResponseJson } from "../gen/weir/v1/billing_service_pb.js";
import type { GetInvoiceResponseJson, MonthDocumentFormatJson } from "../gen/weir/v1/months_pb.js";
import { blobOf, call, file } from "../client.js";
import {
  amount,
  amountPlaces,
  count,
  money,
  monthOf,
  negated,
  perMillion,
  picosOf,
  plain,
  sumOf,
  words,
} from "../format.js";
import type { AnyMoney } from "../format.js";
import { Corrections } from "./corrections.js";
import { AllMonths, MonthActions, Payments } from "./months.js";
import { Badge, Command, Download, Note, Remark, Tile, Tiles, Time } from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { MonthChoice, OrganizationChoice, monthChosen, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const REPORT = "BillingService/GetMonthReport";
const t = text.bill;
const STATES: Record<string, [string, Kind]> = {
  MONTH_STATE_OPEN: [t.open, "warning"],
  MONTH_STATE_CLOSING: [t.closing, "warning"],
  MONTH_STATE_CLOSED: [t.closed, "good"],
};
// Countries whose postal code follows the city, as in the documents.
const CODES_AFTER_CITY = "AU BR CA GB ID IE IN JP KR NZ SG TH TW US ZA".split(" ");

type Report = GetMonthReportResponseJson;
type Line = NonNullable<Report["lines"]>[number];
type Charge = NonNullable<Report["charges"]>[number];

export const month: Page = { id: "month", title: text.pages.month, calls: [REPORT], Show: Month };

function Month() {
  const view = useView();
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const months = await monthChosen(caller, view, chosen.ref);
    const report = await caller(REPORT, { organization: chosen.ref, month: months.month });
    const [invoice, { adjustments = [] }] = await Promise.all([
      report.invoiceNumber
        ? caller("BillingService/GetInvoice", { number: report.invoiceNumber })
        : null,
      caller("BillingService/ListAdjustments", { organization: chosen.ref }),
    ]);
    return { chosen, months, report, invoice, corrections: adjustments };
  });
  return (
    <Show of={found}>
      {({ chosen, months, report, invoice, corrections }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <MonthChoice of={months} />
          </div>
          <Bill organization={chosen.ref} month={months.month} report={report} invoice={invoice}>
            <MonthActions
              key={`${chosen.ref} ${months.month}`}
              organization={chosen.ref}
              month={months.month}
              report={report}
              corrections={corrections}
              reload={found.reload}
            />
          </Bill>
          <Corrections
            of={corrections}
            organization={chosen.ref}
            currency={report.total?.currencyCode ?? chosen.currency}
            invoiceNumber={report.invoiceNumber ?? ""}
            reload={found.reload}
          />
          <AllMonths of={months.months} organization={chosen.ref} />
        </>
      )}
    </Show>
  );
}

function Bill({
  organization,
  month,
  report,
  invoice,
  children,
}: {
  organization: string;
  month: string;
  report: Report;
  invoice: GetInvoiceResponseJson | null;
  children: ReactNode;
}) {
  const payments = invoice?.invoice?.payments ?? [];
  const currency = report.total?.currencyCode ?? "";
  const charges = report.charges ?? [];
  const sums = totals(report);
  const [state, kind] = STATES[report.state ?? ""] ?? ["", ""];
  return (
    <>
      <p>
        <strong>{t.head(report.organizationName ?? "", month)}</strong>{" "}
        <Badge kind={kind}>{state}</Badge>
        {report.closeTime && (
          <>
            {" "}
            <Time of={report.closeTime} /> {t.by(report.closedBy ?? "")}
          </>
        )}
      </p>
      {report.billingProfile && <Note>{t.billedTo(billedTo(report))}</Note>}
      <Tiles>
        <Tile
          name={t.total}
          value={amount(report.totalRounded)}
          unit={currency}
          note={report.taxNote}
        />
        <Tile name={t.exact} value={amount(report.total)} unit={currency} />
        {report.invoiceNumber && <Tile name={t.invoice} value={report.invoiceNumber} />}
        <Tile
          name={t.requests}
          value={count(report.requestCounts?.totalCount)}
          note={endings(report)}
        />
      </Tiles>
      {children}
      <Downloads organization={organization} month={month} report={report} />
      <h2>{t.usage}</h2>
      <Table
        caption={t.lines}
        columns={lineColumns(currency, report.lines ?? [])}
        rows={report.lines}
        empty={t.noUsage}
      />
      {charges.length > 0 && (
        <>
          <h2>{t.charges}</h2>
          <Table caption={t.charges} columns={chargeColumns(currency, charges)} rows={charges} />
        </>
      )}
      <h2>{t.total}</h2>
      <Table caption={t.sums} columns={totalColumns(currency, sums)} rows={sums} isGrid />
      {report.unratedEventCount && (
        <Remark kind="warning">{t.unrated(count(report.unratedEventCount))}</Remark>
      )}
      <Credit report={report} invoice={invoice} currency={currency} />
      {payments.length > 0 && <Payments of={payments} />}
      <Note>{report.taxNote}</Note>
      {report.state !== "MONTH_STATE_CLOSED" && month < monthOf(new Date()) && (
        <Command
          what={t.closeCommand}
        >{`weir month close ${month} --org ${report.organizationName}`}</Command>
      )}
      <Command>{`weir month show ${month} --org ${report.organizationName}`}</Command>
    </>
  );
}

// Addressee of the month's documents, on one line.
export function billedTo({
  organizationName,
  billingProfile: profile = {},
}: Pick<Report, "organizationName" | "billingProfile">): string {
  const place = [profile.city, profile.state];
  place.splice(CODES_AFTER_CITY.includes(profile.country ?? "") ? 2 : 0, 0, profile.postalCode);
  const tax = profile.taxId && t.taxId(profile.taxId);
  const parts = [
    profile.legalName || organizationName,
    profile.addressLine1,
    profile.addressLine2,
    place.filter(Boolean).join(" "),
    profile.country,
    tax,
    ...(profile.emails ?? []),
  ];
  return parts.filter(Boolean).map(plain).join(", ");
}

function endings({ requestCounts = {} }: Report): string {
  const { completedCount, cancelledCount, limitedCount, failedCount } = requestCounts;
  return t.endings(
    count(completedCount),
    count(cancelledCount),
    count(limitedCount),
    count(failedCount),
  );
}

export function lineColumns(currency: string, lines: Line[]) {
  const least = amountPlaces(lines.map((each) => each.amount));
  return [
    column<Line>(text.model, (each) => (
      <>
        {each.model}
        {each.tier === "batch" && ` ${t.batch}`}
        {each.lateMonth && <Note>{t.late(each.lateMonth)}</Note>}
      </>
    )),
    column<Line>(t.kind, (each) => words(each.tokenKind, "TOKEN_KIND_")),
    column<Line>(t.price, (each) => `v${each.priceVersion}`),
    column<Line>(t.requests, (each) => count(each.requestCount), true),
    column<Line>(t.tokens, (each) => count(each.tokenCount), true),
    column<Line>(t.cancelled, (each) => count(each.cancelledTokenCount), true),
    column<Line>(t.perMillion(currency), (each) => perMillion(each.unitPricePicos), true),
    column<Line>(t.amount(currency), (each) => amount(each.amount, least), true),
    column<Line>(t.rounded, (each) => amount(each.roundedAmount), true),
  ];
}

export function chargeColumns(currency: string, charges: Charge[]) {
  const least = amountPlaces(charges.map((each) => each.amount));
  return [
    column<Charge>(t.description, (each) => each.description),
    column<Charge>(t.kind, (each) => words(each.kind, "CHARGE_KIND_")),
    column<Charge>(text.model, (each) => each.model),
    column<Charge>(t.tokens, (each) => (each.tokenCount ? count(each.tokenCount) : ""), true),
    column<Charge>(t.amount(currency), (each) => amount(each.amount, least), true),
    column<Charge>(t.rounded, (each) => amount(each.roundedAmount), true),
  ];
}

interface Sum {
  item: string;
  exact?: AnyMoney;
  rounded?: AnyMoney;
}

export function totalColumns(currency: string, sums: Sum[]) {
  const least = amountPlaces(sums.map((each) => each.exact));
  return [
    column<Sum>(t.item, (each) => each.item),
    column<Sum>(t.exactIn(currency), (each) => each.exact && amount(each.exact, least), true),
    column<Sum>(t.roundedIn(currency), (each) => each.rounded && amount(each.rounded), true),
  ];
}

// Rows whose columns, exact and rounded, each add up to the last row. An empty cell is no part of its
// column.
export function totals(report: Report): Sum[] {
  const lines = [...(report.lines ?? []), ...(report.charges ?? [])];
  return [
    {
      item: t.sumOfLines,
      exact: report.total,
      rounded: sumOf(lines.map((each) => each.roundedAmount)),
    },
    { item: t.carriedIn, exact: report.carriedIn },
    { item: t.carriedOut, exact: negated(report.carriedOut) },
    { item: t.rounding, rounded: report.rounding },
    { item: t.total, exact: report.totalRounded, rounded: report.totalRounded },
  ];
}

function Credit({
  report: { prepaidCredit, creditNotes = [] },
  invoice,
  currency,
}: {
  report: Report;
  invoice: GetInvoiceResponseJson | null;
  currency: string;
}) {
  const hasCredit =
    prepaidCredit &&
    [prepaidCredit.granted, prepaidCredit.expired, prepaidCredit.remaining].some(
      (each) => picosOf(each) !== 0n,
    );
  return (
    <>
      {hasCredit && (
        <>
          <h2>{t.prepaid}</h2>
          <Tiles>
            <Tile name={t.granted} value={amount(prepaidCredit.granted)} unit={currency} />
            <Tile name={t.expired} value={amount(prepaidCredit.expired)} unit={currency} />
            <Tile name={t.remaining} value={amount(prepaidCredit.remaining)} unit={currency} />
          </Tiles>
        </>
      )}
      {creditNotes.map((note) => (
        <Remark key={note.number}>
          {t.refunds(
            note.number ?? "",
            money(note.amount),
            note.invoiceNumber ?? "",
            note.reason ?? "",
          )}
        </Remark>
      ))}
      {(invoice?.creditNotes ?? []).map((note) => (
        <Remark key={note.creditNoteNumber}>
          {t.creditNote(note.creditNoteNumber ?? "", money(note.amount), note.reason ?? "")}
        </Remark>
      ))}
    </>
  );
}

function Downloads({
  organization,
  month,
  report,
}: {
  organization: string;
  month: string;
  report: Report;
}) {
  const document = async (format: MonthDocumentFormatJson, ending: string) => {
    const { content } = await call("BillingService/GetMonthDocument", {
      organization,
      month,
      format,
    });
    return { name: `${report.organizationName}-${month}.${ending}`, content: blobOf(content) };
  };
  return (
    <div className="buttons">
      <Download
        fetched={() =>
          file("BillingService/ExportMonth", {
            organization,
            month,
            format: "MONTH_EXPORT_FORMAT_INVOICE_PDF",
          })
        }
      >
        {report.invoiceNumber ? t.invoicePdf : t.draftPdf}
      </Download>
      <Download fetched={() => document("MONTH_DOCUMENT_FORMAT_CSV", "csv")}>{t.csv}</Download>
      <Download fetched={() => document("MONTH_DOCUMENT_FORMAT_JSON", "json")}>{t.json}</Download>
      <Download
        fetched={() =>
          file("BillingService/ExportMonth", {
            organization,
            month,
            format: "MONTH_EXPORT_FORMAT_FOCUS_CSV",
          })
        }
      >
        {t.focus}
      </Download>
    </div>
  );
}
