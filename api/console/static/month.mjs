// Month report: preliminary, or as closed. Amounts are exact; the server adds them up.

import { blobOf, file } from "./client.mjs";
import { badge, column, command, h, remark, swap, table, tile, tiles, time } from "./dom.mjs";
import { amount, amountPlaces, count, money, negated, perMillion, picosOf, plain, sumOf, words } from "./format.mjs";

const REPORT = "BillingService/GetMonthReport", DOCUMENT = "BillingService/GetMonthDocument", EXPORT = "BillingService/ExportMonth", INVOICE = "BillingService/GetInvoice";
const STATES = { MONTH_STATE_OPEN: ["open: preliminary invoice", "warning"], MONTH_STATE_CLOSING: ["closing", "warning"], MONTH_STATE_CLOSED: ["closed", "good"] };
// Countries whose postal code follows the city, as in the documents.
const CODES_AFTER_CITY = "AU BR CA GB ID IE IN JP KR NZ SG TH TW US ZA".split(" ");

export const month = {
  id: "month",
  title: "Month",
  calls: [REPORT],
  scopes: "billing or admin",
  async show(view) {
    const { ref, chooser } = await view.organization();
    const { chosen, chooser: months } = await view.month(ref);
    const report = await view.call(REPORT, { organization: ref, month: chosen });
    const invoice = report.invoiceNumber ? await view.call(INVOICE, { number: report.invoiceNumber }) : null;
    const currency = report.total?.currencyCode ?? "";
    const [charges, sums] = [report.charges ?? [], totals(report)];
    const [state, kind] = STATES[report.state] ?? ["", ""];
    swap(view.body,
      h("div", { class: "controls" }, chooser, months),
      h("p", {}, h("strong", {}, `${plain(report.organizationName)}, ${chosen} (UTC) `), badge(state, kind), report.closeTime && [" ", time(report.closeTime), ` by ${plain(report.closedBy)}`]),
      report.billingProfile && h("p", { class: "note" }, `Billed to ${billedTo(report)}`),
      tiles(tile("Total", amount(report.totalRounded), currency, report.taxNote ?? ""), tile("Exact sum of the lines", amount(report.total), currency),
        report.invoiceNumber && tile("Invoice", report.invoiceNumber), tile("Requests", count(report.requestCounts?.totalCount), "", endings(report.requestCounts ?? {}))),
      downloads(view, ref, chosen, report),
      h("h2", {}, "Usage"),
      table("Invoice lines", lineColumns(currency, report.lines ?? []), report.lines ?? [], { empty: "No usage." }),
      charges.length > 0 && [h("h2", {}, "Plan, corrections and credit"), table("Plan, corrections and credit", chargeColumns(currency, charges), charges)],
      h("h2", {}, "Total"),
      table("From the lines to the total", totalColumns(currency, sums), sums, { isGrid: true }),
      report.unratedEventCount && remark("warning", `${count(report.unratedEventCount)} recorded usage events are not in the lines above yet.`),
      creditPart(report, invoice, currency),
      h("p", { class: "note" }, report.taxNote ?? ""),
      report.state !== "MONTH_STATE_CLOSED" && command("Close the month (you cannot reopen it)", `weir month close ${chosen} --org ${report.organizationName}`),
      command("Command", `weir month show ${chosen} --org ${report.organizationName}`));
  },
};

// Addressee of the month's documents, on one line.
export function billedTo({ organizationName, billingProfile: profile }) {
  const place = [profile.city, profile.state];
  place.splice(CODES_AFTER_CITY.includes(profile.country) ? 2 : 0, 0, profile.postalCode);
  const tax = profile.taxId && `tax ID ${profile.taxId}`;
  return [profile.legalName || organizationName, profile.addressLine1, profile.addressLine2, place.filter(Boolean).join(" "), profile.country, tax, ...(profile.emails ?? [])]
    .filter(Boolean).map(plain).join(", ");
}

function endings({ completedCount, cancelledCount, limitedCount, failedCount }) {
  return `${count(completedCount)} completed, ${count(cancelledCount)} cancelled, ${count(limitedCount)} limited, ${count(failedCount)} failed`;
}

export function lineColumns(currency, lines) {
  const least = amountPlaces(lines.map((each) => each.amount));
  return [
    column("Model", (each) => [each.model, each.tier === "batch" ? " (batch)" : "", each.lateMonth && h("div", { class: "note" }, `late usage of ${each.lateMonth}`)]),
    column("Kind", (each) => words(each.tokenKind, "TOKEN_KIND_")),
    column("Price", (each) => `v${each.priceVersion}`),
    column("Requests", (each) => count(each.requestCount), true),
    column("Tokens", (each) => count(each.tokenCount), true),
    column("Cancelled", (each) => count(each.cancelledTokenCount), true),
    column(`Per million, ${currency}`, (each) => perMillion(each.unitPricePicos), true),
    column(`Amount, ${currency}`, (each) => amount(each.amount, least), true),
    column("Rounded", (each) => amount(each.roundedAmount), true),
  ];
}

export function chargeColumns(currency, charges) {
  const least = amountPlaces(charges.map((each) => each.amount));
  return [
    column("Description", (each) => each.description),
    column("Kind", (each) => words(each.kind, "CHARGE_KIND_")),
    column("Model", (each) => each.model),
    column("Tokens", (each) => (each.tokenCount ? count(each.tokenCount) : ""), true),
    column(`Amount, ${currency}`, (each) => amount(each.amount, least), true),
    column("Rounded", (each) => amount(each.roundedAmount), true),
  ];
}

export function totalColumns(currency, sums) {
  const least = amountPlaces(sums.map((each) => each.exact));
  return [
    column("Item", (each) => each.item),
    column(`Exact, ${currency}`, (each) => each.exact && amount(each.exact, least), true),
    column(`Rounded, ${currency}`, (each) => each.rounded && amount(each.rounded), true),
  ];
}

// Rows whose columns, exact and rounded, each add up to the last row. An empty cell is no part of its column.
export function totals(report) {
  const lines = [...(report.lines ?? []), ...(report.charges ?? [])];
  return [
    { item: "Sum of the lines", exact: report.total, rounded: sumOf(lines.map((each) => each.roundedAmount)) },
    { item: "Rounding carried from previous months", exact: report.carriedIn },
    { item: "Rounding carried to the next month", exact: negated(report.carriedOut) },
    { item: "Rounding", rounded: report.rounding },
    { item: "Total", exact: report.totalRounded, rounded: report.totalRounded },
  ];
}

function creditPart({ prepaidCredit, creditNotes = [] }, invoice, currency) {
  const parts = [];
  if (prepaidCredit && [prepaidCredit.granted, prepaidCredit.expired, prepaidCredit.remaining].some((each) => picosOf(each) !== 0n)) {
    parts.push(h("h2", {}, "Prepaid credit"), tiles(tile("Granted", amount(prepaidCredit.granted), currency), tile("Expired", amount(prepaidCredit.expired), currency), tile("Remaining", amount(prepaidCredit.remaining), currency)));
  }
  for (const note of creditNotes) parts.push(remark("", `${plain(note.number)} refunds ${money(note.amount)} of ${plain(note.invoiceNumber)}: ${plain(note.reason)}`));
  for (const note of invoice?.creditNotes ?? []) parts.push(remark("", `Credit note ${plain(note.creditNoteNumber)} on this invoice: ${money(note.amount)}, ${plain(note.reason)}`));
  return parts;
}

function downloads(view, organization, month, report) {
  const bytes = async (format, ending) => {
    const { content } = await view.call(DOCUMENT, { organization, month, format });
    return { name: `${report.organizationName}-${month}.${ending}`, content: blobOf(content) };
  };
  return h("div", { class: "buttons" },
    view.download(report.invoiceNumber ? "Invoice as PDF" : "Draft as PDF", () => file(EXPORT, { organization, month, format: "MONTH_EXPORT_FORMAT_INVOICE_PDF" })),
    view.download("Report as CSV", () => bytes("MONTH_DOCUMENT_FORMAT_CSV", "csv")),
    view.download("Report as JSON", () => bytes("MONTH_DOCUMENT_FORMAT_JSON", "json")),
    view.download("Charges as FOCUS CSV", () => file(EXPORT, { organization, month, format: "MONTH_EXPORT_FORMAT_FOCUS_CSV" })));
}
