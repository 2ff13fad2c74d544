"""Names of the values of the contract, separated by spaces.

Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
"""

from __future__ import annotations

VALUES = """
AcceptedInvitation Adjustment AdjustmentState Alert AlertDelivery AlertDeliveryState AlertInvoice
AlertKey AlertWebhook ApiKey AppliedConfiguration AppliedFleet AppliedPrice AuditEntry AuditPage
BillingProfile ChangeAction ClosedMonth ClosedOrganization ClosedProject Closure ClosureEffects
Concern ConcernKind ConfigurationChange ConfigurationViolation CreatedAlertWebhook CreatedApiKey
CreatedInvitation CreditBalance CreditGrant CreditNoteSummary DocumentFormat DrainedReplica EndUser
EndUserLimits EndUserState ErasedEndUser FieldChange FinishReason FleetChange FleetProcess
FleetVersion FleetViolation Generation GenerationState Invitation Invoice InvoiceLine InvoicePayment
KeyChange KeyRestrictions KillResult KilledRequest Latency LiveOrganization LiveRequest LiveView
Member Model ModelTask ModelTraffic ModelVersion Month MonthCharge MonthExportFormat MonthReport
MonthReportLine MonthState MonthVerification Obstacle Organization PaymentState Person Plan
PlanAssignment PlanList PrepaidCredit Price PriceList PriceVersion Project QuotaDimension
QuotaStatus QuotaSubject Quote Reconciliation RecordedRequest RefusedField RemainingCredit
RemovedMember Replica ReplicaDrain ReplicaList ReplicaRental ReplicaState RequestCounts RequestPhase
ResalePrice ResaleStatement ResaleStatementFormat ResaleStatementLine ResentInvitation RotatedApiKey
ServedFleet ServiceAccount SimulatedCustomer Stage Suspension Timings TokenIssuer TokenKind
TokenLogprob TokenLogprobs TokenProject TokenRevocation Traffic TrafficError TrafficPeriod
UndrainedReplica Usage UsageForecast UsageGrouping UsagePage UsageReport UsageRow UsageShare
"""
