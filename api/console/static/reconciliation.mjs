// A month from its usage to its invoice: what each stage says beside the one before it, and every exception.

import { badge, column, command, h, remark, swap, table, time } from "./dom.mjs";
import { amount, count, money, picosOf, plain, whole, words } from "./format.mjs";

const REPORT = "BillingService/GetMonthReport", INVOICE = "BillingService/GetInvoice", VERIFY = "BillingService/VerifyMonth";
const ADJUSTMENTS = "BillingService/ListAdjustments", RECEIPTS = "ReceiptService/GetReceiptMonth", MONTHS = "BillingService/ListMonths";

export const reconciliation = {
  id: "reconciliation",
  title: "Reconciliation",
  calls: [MONTHS],
  scopes: "billing or admin",
  async show(view) {
    const { ref, chooser } = await view.organization();
    const { chosen, chooser: picker, months } = await view.month(ref);
    const asked = { organization: ref, month: chosen };
    const told = months.find((each) => each.month === chosen);
    const isClosed = told?.state === "MONTH_STATE_CLOSED";
    const [report, receipts, { adjustments = [] }, verified, invoice] = await Promise.all([
      view.call(REPORT, asked), view.call(RECEIPTS, asked), view.call(ADJUSTMENTS, { organization: ref, undecidedOnly: true }),
      isClosed ? view.call(VERIFY, asked) : null, told?.invoiceNumber ? view.call(INVOICE, { number: told.invoiceNumber }) : null,
    ]);
    const stages = stagesOf(report, receipts, verified, invoice?.invoice, told);
    const exceptions = stages.filter((each) => each.exception);
    swap(view.body,
      h("div", { class: "controls" }, chooser, picker),
      exceptions.length === 0
        ? remark("good", `Every stage of ${chosen} that is here says the same.`)
        : exceptions.map((each) => remark("bad", h("strong", {}, `${each.stage}: `), each.exception)),
      report.unratedEventCount && remark("warning", `${count(report.unratedEventCount)} usage events are not rated yet. The billing worker does that within seconds; if this number stays, look at its log.`),
      h("h2", {}, `${plain(report.organizationName)}, ${chosen} (UTC)`),
      table("Stages of the month", [
        column("Stage", (each) => each.stage),
        column("What it says", (each) => each.says),
        column("Beside", (each) => each.beside),
        column("Verdict", (each) => each.exception ? badge("differs", "bad") : each.open ? badge(each.open, "warning") : badge("agrees", "good")),
      ], stages),
      h("h2", {}, "Corrections that wait for a decision"),
      table("Corrections that wait", [
        column("Proposed", (each) => time(each.createTime)),
        column("By", (each) => h("span", { class: "id" }, each.author)),
        column("For", (each) => each.invoiceNumber || "the next invoice"),
        column("Why", (each) => each.reason),
        column("Amount", (each) => money(each.amount), true),
      ], adjustments, { empty: "None." }),
      h("h2", {}, "All months"),
      table("Months of the organization", [
        column("Month", (each) => h("a", { href: `#/month?month=${each.month}${ref ? `&org=${encodeURIComponent(ref)}` : ""}` }, each.month)),
        column("State", (each) => badge(words(each.state, "MONTH_STATE_"), each.state === "MONTH_STATE_CLOSED" ? "good" : "warning")),
        column("Closed", (each) => time(each.closeTime)),
        column("By", (each) => h("span", { class: "id" }, each.closedBy ?? "")),
        column("Invoice", (each) => each.invoiceNumber || (each.state === "MONTH_STATE_CLOSED" ? "nothing to invoice" : "")),
        column("Total", (each) => (each.total ? money(each.total) : ""), true),
      ], months, { empty: "No month yet." }),
      command("What was exported, and what the biller counts and has invoiced, by whoever may read the database", `weir reconcile ${chosen}`),
      command("Whether the books are right in themselves", "weir fsck"));
  },
};

// One row for each stage: what it says, what the stage before it says, and where the two differ.
function stagesOf(report, receipts, verified, invoice, month) {
  const check = report.reconciliation ?? {};
  const stages = [{
    stage: "Usage to ledger",
    says: `${count(check.ledgerTokenCount)} tokens posted, ${count(check.unratedTokenCount)} not rated yet`,
    beside: `${count(check.usageTokenCount)} tokens in usage events`,
    open: whole(check.unratedTokenCount) > 0n && "not all rated",
    exception: !check.balanced && "the ledger and the usage events have not the same number of tokens. `weir fsck` tells which.",
  }];
  if (invoice) {
    const isSame = picosOf(invoice.total) === picosOf(report.totalRounded) && picosOf(invoice.total) === picosOf(month?.total);
    stages.push({
      stage: "Ledger to invoice",
      says: `${plain(invoice.number)} over ${money(invoice.total)}${picosOf(invoice.credited) ? `, ${amount(invoice.credited)} credited since` : ""}`,
      beside: `the month's report comes to ${money(report.totalRounded)}`,
      exception: !isSame && "the invoice is not over what the report of its month comes to.",
    });
  } else {
    stages.push({
      stage: "Ledger to invoice",
      says: month?.state === "MONTH_STATE_CLOSED" ? "closed with nothing to invoice" : "no invoice yet",
      beside: `the report comes to ${money(report.totalRounded)} now`,
      open: month?.state !== "MONTH_STATE_CLOSED" && "month open",
      exception: month?.state === "MONTH_STATE_CLOSED" && picosOf(report.totalRounded) !== 0n && "the month was closed without an invoice, and its report is not zero.",
    });
  }
  if (verified) {
    stages.push({
      stage: "Closed report",
      says: h("span", { class: "id" }, verified.jsonSha256),
      beside: h("span", { class: "id" }, verified.month?.jsonSha256 ?? ""),
      exception: !verified.reproduced && `the ledger does not give the report of the close any more: ${(verified.differences ?? []).map(plain).join("; ")}`,
    });
  }
  const isClosed = month?.state === "MONTH_STATE_CLOSED";
  stages.push({
    stage: "Receipts",
    says: `${count(receipts.receiptCount)} receipts${receipts.unreceiptedCount ? `, ${count(receipts.unreceiptedCount)} parts of usage without one` : ""}`,
    beside: report.receiptsRoot ? h("span", { class: "id" }, report.receiptsRoot) : (isClosed ? "there were none at the close" : "their root is frozen when the month is closed"),
    open: !report.receiptsRoot && (isClosed ? "none" : "month open"),
    exception: report.receiptsRoot && hexOf(receipts.root ?? "") !== report.receiptsRoot && "their root is not the one that was frozen at the close.",
  });
  return stages;
}

// Bytes of the wire in hexadecimal.
function hexOf(base64) {
  return [...atob(base64)].map((each) => each.charCodeAt(0).toString(16).padStart(2, "0")).join("");
}
