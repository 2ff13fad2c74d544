// Reconciliation of a month from usage to invoice and export, with all differences. The server compares.

import { badge, column, command, h, id, remark, swap, table, time } from "./dom.mjs";
import { count, money, plain, wait, words } from "./format.mjs";

const STAGES = "BillingService/GetReconciliation", VERIFY = "BillingService/VerifyMonth";
const ADJUSTMENTS = "BillingService/ListAdjustments", RECEIPTS = "ReceiptService/GetReceiptMonth";

export const reconciliation = {
  id: "reconciliation",
  title: "Reconciliation",
  calls: [STAGES],
  scopes: "billing or admin",
  async show(view) {
    const { ref, chooser } = await view.organization();
    const { chosen, chooser: picker, months } = await view.month(ref);
    const asked = { organization: ref, month: chosen };
    const entry = months.find((each) => each.month === chosen);
    const [stages, receipts, { adjustments = [] }, verified] = await Promise.all([
      view.call(STAGES, asked), view.call(RECEIPTS, asked), view.call(ADJUSTMENTS, { organization: ref, undecidedOnly: true }),
      entry?.state === "MONTH_STATE_CLOSED" ? view.call(VERIFY, asked) : null,
    ]);
    const organization = stages.organizationName ?? "";
    swap(view.body,
      h("div", { class: "controls" }, chooser, picker),
      exceptions(stages, verified, chosen),
      h("h2", {}, `${plain(organization)}, ${chosen} (UTC)`),
      table("Tokens at each stage", columns(stages.exported), stages.sums ?? [], { empty: "No usage in this month.", isGrid: true }),
      h("p", { class: "note" }, stages.exported ? ["Due: usage before ", time(stages.dueTime), ", which should be at the biller by now."] : "Export is off, so only the ledger and the invoices are compared."),
      h("h2", {}, "Documents"),
      table("Documents of the month", [column("Document", ([name]) => name), column("Content", ([, content]) => content), column("Digest", ([,, digest]) => id(digest))], documents(entry, verified, receipts)),
      h("h2", {}, "Corrections that wait for approval"),
      table("Corrections that wait for approval", [
        column("Proposed", (each) => time(each.createTime)),
        column("By", (each) => id(each.author)),
        column("For", (each) => each.invoiceNumber || "the next invoice"),
        column("Reason", (each) => each.reason),
        column("Amount", (each) => money(each.amount), true),
      ], adjustments, { empty: "None." }),
      h("h2", {}, "All months"),
      table("Months of the organization", [
        column("Month", (each) => h("a", { href: `#/month?month=${each.month}&org=${encodeURIComponent(ref)}` }, each.month)),
        column("State", (each) => badge(words(each.state, "MONTH_STATE_"), each.state === "MONTH_STATE_CLOSED" ? "good" : "warning")),
        column("Closed", (each) => time(each.closeTime)),
        column("By", (each) => id(each.closedBy)),
        column("Invoice", (each) => each.invoiceNumber || (each.state === "MONTH_STATE_CLOSED" ? "nothing to invoice" : "")),
        column("Total", (each) => (each.total ? money(each.total) : ""), true),
        column("Payment", (each) => (each.payments ?? []).map(paymentBadge)),
      ], months, { empty: "There is no month yet: it begins with the first request." }),
      command("Compare with Stripe, where the database and the key of Stripe are", `weir reconcile ${chosen} --org ${organization}`),
      command("Check that all usage and money fit together", "weir fsck"));
  },
};

const PAYMENT_KINDS = { PAYMENT_STATE_PAID: "good", PAYMENT_STATE_FAILED: "bad", PAYMENT_STATE_OVERDUE: "bad", PAYMENT_STATE_UNCOLLECTIBLE: "bad" };

function paymentBadge({ state }) {
  return badge(words(state, "PAYMENT_STATE_"), PAYMENT_KINDS[state] ?? "");
}

function exceptions({ differences = [] }, verified, month) {
  const found = differences.map((each) => remark("bad",
    h("strong", {}, `${plain(each.stage)}: `), `${plain(headline(each))}. `, h("br"), `What to do: ${plain(each.remedy)}.`));
  if (verified && !verified.reproduced) {
    found.push(remark("bad", h("strong", {}, "closed report: "), `the ledger no longer reproduces it: ${(verified.differences ?? []).map(plain).join("; ")}`));
  }
  return found.length ? found : remark("good", `Usage, ledger and invoices of ${month} agree.`);
}

function headline({ model, priceVersion, tokenKind, tokenCount, amount, sinceTime, detail }) {
  const where = [model, priceVersion && `version ${priceVersion}`, words(tokenKind)].filter(Boolean).join(" ");
  const what = [tokenCount && `${count(tokenCount)} tokens`, amount && money(amount)].filter(Boolean).join(", ");
  const age = sinceTime && `for ${wait((Date.now() - new Date(sinceTime)) / 1000)}`;
  return [where, [what, age].filter(Boolean).join(", "), detail].filter(Boolean).join(": ");
}

function columns(isExported) {
  const figure = (head, name) => column(head, (each) => count(each[name]), true);
  return [
    column("Model", (each) => [each.model, each.tier === "batch" ? " (batch)" : ""]),
    column("Price", (each) => `v${each.priceVersion}`),
    column("Tokens", (each) => words(each.tokenKind)),
    figure("Used", "usedTokenCount"), figure("In the ledger", "postedTokenCount"), figure("Closed", "billedTokenCount"), figure("Invoiced", "invoicedTokenCount"),
    ...(isExported ? [figure("Due", "dueTokenCount"), figure("In batches", "batchedTokenCount"), figure("Delivered", "deliveredTokenCount")] : []),
  ];
}

function documents(month, verified, receipts) {
  const rows = [["Receipts", `${count(receipts.receiptCount)}${receipts.missingReceiptCount ? `, and ${count(receipts.missingReceiptCount)} parts of usage without one, from before receipts existed` : ""}`, month?.receiptsRoot ?? ""]];
  if (verified) rows.unshift(["Closing report", verified.reproduced ? badge("reproduced from the ledger", "good") : badge("not reproduced", "bad"), verified.month?.jsonSha256 ?? ""]);
  if (month?.invoiceNumber) rows.unshift(["Invoice", `${plain(month.invoiceNumber)} over ${money(month.total)}`, month.pdfSha256 ?? ""]);
  return rows;
}
