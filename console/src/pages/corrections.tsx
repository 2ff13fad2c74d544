// Corrections of bills: adjustments of the next invoice and credit notes. One person proposes,
// another approves; the server decides who is another person.

import type { AdjustmentJson } from "../gen/weir/v1/months_pb.js";
import { file } from "../client.js";
import { money, words } from "../format.js";
import { Action, moneyOf } from "../parts/actions.js";
import { Badge, Download, Id, Note, Time } from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { useView } from "../view.js";

const KINDS: Record<string, Kind> = {
  ADJUSTMENT_STATE_PROPOSED: "warning",
  ADJUSTMENT_STATE_APPROVED: "good",
};
const t = text.corrections;

export function Corrections({
  of,
  organization,
  currency,
  invoiceNumber,
  reload,
}: {
  of: AdjustmentJson[];
  organization: string;
  currency: string;
  invoiceNumber: string; // of the month that is shown; empty if it has none
  reload: () => void;
}) {
  return (
    <>
      <h2>{t.title}</h2>
      <Table
        caption={t.title}
        columns={[
          column<AdjustmentJson>(t.proposed, (each) => (
            <>
              <Time of={each.createTime} />
              <Note>{t.by(each.author ?? "")}</Note>
            </>
          )),
          column<AdjustmentJson>(t.for, (each) => each.invoiceNumber || t.nextInvoice),
          column<AdjustmentJson>(t.reason, (each) => each.reason),
          column<AdjustmentJson>(t.amount, (each) => money(each.amount), true),
          column<AdjustmentJson>(text.state, (each) => <State of={each} />),
          column<AdjustmentJson>(text.change, (each) => <Decision of={each} reload={reload} />),
        ]}
        rows={of}
        empty={t.none}
        keyOf={(each) => each.adjustmentId}
      />
      <div className="buttons">
        <Action
          call="BillingService/CreateAdjustment"
          label={t.propose}
          title={t.proposeTitle}
          explanation={t.proposeExplanation}
          act={t.propose}
          fields={[
            { name: "amount", label: t.amountIn(currency), help: t.amountHelp, isRequired: true },
            { name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true },
          ]}
          request={(values, requestId) => ({
            organization,
            amount: moneyOf("amount", values["amount"], currency),
            reason: values["reason"] ?? "",
            requestId,
          })}
          done={({ adjustment }) => t.isProposed(money(adjustment?.amount))}
          changed={reload}
        />
        {invoiceNumber && (
          <Action
            call="BillingService/CreateCreditNote"
            label={t.refund}
            about={invoiceNumber}
            title={t.refundTitle(invoiceNumber)}
            explanation={t.refundExplanation}
            act={t.refund}
            fields={[
              { name: "amount", label: t.refundIn(currency), isRequired: true },
              { name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true },
            ]}
            request={(values, requestId) => ({
              invoiceNumber,
              amount: moneyOf("amount", values["amount"], currency),
              reason: values["reason"] ?? "",
              requestId,
            })}
            done={({ creditNote }) => t.isProposed(money(creditNote?.amount))}
            changed={reload}
          />
        )}
      </div>
    </>
  );
}

function State({ of: each }: { of: AdjustmentJson }) {
  const number = each.creditNoteNumber;
  return (
    <>
      <Badge kind={KINDS[each.state ?? ""] ?? ""}>{words(each.state, "ADJUSTMENT_STATE_")}</Badge>
      {each.decidedBy && (
        <Note>
          {t.by(each.decidedBy)}, <Time of={each.decideTime} />
        </Note>
      )}
      {each.billingMonth && <Note>{t.postedTo(each.billingMonth)}</Note>}
      {number && (
        <>
          <Id of={number} />{" "}
          <Download
            fetched={() => file("BillingService/ExportMonth", { creditNoteNumber: number })}
          >
            {t.pdf}
          </Download>
        </>
      )}
    </>
  );
}

// Approve or reject a proposal. Its author can only withdraw it.
function Decision({ of: each, reload }: { of: AdjustmentJson; reload: () => void }) {
  const view = useView();
  if (each.state !== "ADJUSTMENT_STATE_PROPOSED") return null;
  const { adjustmentId = "", reason = "" } = each;
  const amount = money(each.amount);
  const isOwn = each.author === view.session.keyPrefix;
  return (
    <div className="buttons tight">
      {isOwn && view.may("BillingService/ApproveAdjustment") && <Note>{t.needsOther}</Note>}
      {!isOwn && (
        <Action
          call="BillingService/ApproveAdjustment"
          label={t.approve}
          about={reason}
          title={t.approveTitle(amount)}
          explanation={
            each.invoiceNumber
              ? t.approveNote(reason, each.invoiceNumber)
              : t.approveExplanation(reason)
          }
          act={t.approve}
          request={() => ({ adjustmentId })}
          done={({ adjustment }) =>
            t.isApproved(amount, adjustment?.billingMonth ?? "", adjustment?.creditNoteNumber ?? "")
          }
          changed={reload}
        />
      )}
      <Action
        call="BillingService/RejectAdjustment"
        label={isOwn ? t.withdraw : t.reject}
        about={reason}
        title={isOwn ? t.withdrawTitle(amount) : t.rejectTitle(amount)}
        explanation={t.rejectExplanation(reason)}
        act={isOwn ? t.withdraw : t.reject}
        isDanger
        request={() => ({ adjustmentId })}
        done={() => t.isRejected(amount)}
        changed={reload}
      />
    </div>
  );
}
