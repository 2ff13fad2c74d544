/**
 * Conversion of messages to values.
 *
 * Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
 */

import { create, toJson } from "@bufbuild/protobuf";
import { count, date, dimension, durationMs, money, name, word } from "./conversion.js";
import {
  ApiKeySchema,
  AuditEntrySchema,
  CloseOrganizationResponseSchema,
  CloseProjectResponseSchema,
  CreateApiKeyResponseSchema,
  EraseEndUserResponseSchema,
  ExportAuditEntriesResponseSchema,
  OrganizationSchema,
  PreviewQuotaResponseSchema,
  PreviewedDaySchema,
  PreviewedMemberSchema,
  ProjectSchema,
  RotateApiKeyResponseSchema,
  SuspensionSchema,
  type ApiKey as ApiKeyMessage,
  type AuditEntry as AuditEntryMessage,
  type CloseOrganizationResponse as CloseOrganizationResponseMessage,
  type CloseProjectResponse as CloseProjectResponseMessage,
  type CreateApiKeyResponse as CreateApiKeyResponseMessage,
  type EraseEndUserResponse as EraseEndUserResponseMessage,
  type ExportAuditEntriesResponse as ExportAuditEntriesResponseMessage,
  type Organization as OrganizationMessage,
  type PreviewQuotaResponse as PreviewQuotaResponseMessage,
  type PreviewedDay as PreviewedDayMessage,
  type PreviewedMember as PreviewedMemberMessage,
  type Project as ProjectMessage,
  type RotateApiKeyResponse as RotateApiKeyResponseMessage,
  type Suspension as SuspensionMessage,
} from "./gen/weir/v1/admin_service_pb.js";
import {
  AlertDeliverySchema,
  AlertDeliveryState as AlertDeliveryStateMessage,
  AlertInvoiceSchema,
  AlertKeySchema,
  AlertSchema,
  AlertWebhookSchema,
  SetAlertWebhookResponseSchema,
  type Alert as AlertMessage,
  type AlertDelivery as AlertDeliveryMessage,
  type AlertInvoice as AlertInvoiceMessage,
  type AlertKey as AlertKeyMessage,
  type AlertWebhook as AlertWebhookMessage,
  type SetAlertWebhookResponse as SetAlertWebhookResponseMessage,
} from "./gen/weir/v1/alerts_pb.js";
import {
  GetMonthReportResponseSchema,
  MonthReportLineSchema,
  ReconciliationSchema,
  RequestCountsSchema,
  TokenKind as TokenKindMessage,
  type GetMonthReportResponse as GetMonthReportResponseMessage,
  type MonthReportLine as MonthReportLineMessage,
  type Reconciliation as ReconciliationMessage,
  type RequestCounts as RequestCountsMessage,
} from "./gen/weir/v1/billing_service_pb.js";
import {
  ClosureEffectsSchema,
  ClosureSchema,
  RemainingCredit as RemainingCreditMessage,
  type Closure as ClosureMessage,
  type ClosureEffects as ClosureEffectsMessage,
} from "./gen/weir/v1/closures_pb.js";
import {
  ApplyConfigurationResponseSchema,
  ConfigurationChangeSchema,
  ConfigurationChange_Action as ConfigurationChange_ActionMessage,
  ConfigurationViolationSchema,
  FieldChangeSchema,
  QuotaConfigurationSchema,
  type ApplyConfigurationResponse as ApplyConfigurationResponseMessage,
  type ConfigurationChange as ConfigurationChangeMessage,
  type ConfigurationViolation as ConfigurationViolationMessage,
  type FieldChange as FieldChangeMessage,
} from "./gen/weir/v1/configuration_pb.js";
import {
  EndUserSchema,
  EndUserState as EndUserStateMessage,
  GetEndUserResponseSchema,
  type EndUser as EndUserMessage,
  type GetEndUserResponse as GetEndUserResponseMessage,
} from "./gen/weir/v1/end_users_pb.js";
import {
  ApplyFleetResponseSchema,
  FleetChangeSchema,
  FleetProcessSchema,
  FleetVersionSchema,
  FleetViolationSchema,
  GetFleetResponseSchema,
  type ApplyFleetResponse as ApplyFleetResponseMessage,
  type FleetChange as FleetChangeMessage,
  type FleetProcess as FleetProcessMessage,
  type FleetVersion as FleetVersionMessage,
  type FleetViolation as FleetViolationMessage,
  type GetFleetResponse as GetFleetResponseMessage,
} from "./gen/weir/v1/fleet_pb.js";
import {
  GenerationSchema,
  Generation_State as Generation_StateMessage,
  KeyChangeSchema,
  KeyRestrictionsSchema,
  ModelSchema,
  ModelTask as ModelTaskMessage,
  ModelVersionSchema,
  PriceSchema,
  QuoteResponseSchema,
  RefusedFieldSchema,
  ServiceTier,
  TokenLogprobSchema,
  TokenLogprobsSchema,
  type Generation as GenerationMessage,
  type KeyChange as KeyChangeMessage,
  type KeyRestrictions as KeyRestrictionsMessage,
  type Model as ModelMessage,
  type ModelVersion as ModelVersionMessage,
  type Price as PriceMessage,
  type QuoteResponse as QuoteResponseMessage,
  type RefusedField as RefusedFieldMessage,
  type TokenLogprob as TokenLogprobMessage,
  type TokenLogprobs as TokenLogprobsMessage,
} from "./gen/weir/v1/inference_service_pb.js";
import {
  GetRequestResponseSchema,
  KillRequestResponseSchema,
  KillRequestResponse_Result as KillRequestResponse_ResultMessage,
  ListLiveRequestsResponseSchema,
  LiveOrganizationSchema,
  LiveRequestSchema,
  RequestPhase as RequestPhaseMessage,
  type GetRequestResponse as GetRequestResponseMessage,
  type KillRequestResponse as KillRequestResponseMessage,
  type ListLiveRequestsResponse as ListLiveRequestsResponseMessage,
  type LiveOrganization as LiveOrganizationMessage,
  type LiveRequest as LiveRequestMessage,
} from "./gen/weir/v1/live_requests_pb.js";
import {
  AcceptInvitationResponseSchema,
  ErasePersonResponseSchema,
  InvitationSchema,
  InviteMemberResponseSchema,
  MemberSchema,
  PersonSchema,
  ProvisionedGroupSchema,
  RemoveMemberResponseSchema,
  ResendInvitationResponseSchema,
  ServiceAccountSchema,
  type AcceptInvitationResponse as AcceptInvitationResponseMessage,
  type ErasePersonResponse as ErasePersonResponseMessage,
  type Invitation as InvitationMessage,
  type InviteMemberResponse as InviteMemberResponseMessage,
  type Member as MemberMessage,
  type Person as PersonMessage,
  type ProvisionedGroup as ProvisionedGroupMessage,
  type RemoveMemberResponse as RemoveMemberResponseMessage,
  type ResendInvitationResponse as ResendInvitationResponseMessage,
  type ServiceAccount as ServiceAccountMessage,
} from "./gen/weir/v1/members_pb.js";
import {
  AdjustmentSchema,
  AdjustmentState as AdjustmentStateMessage,
  ChargeKind as ChargeKindMessage,
  CloseMonthResponseSchema,
  CreditNoteSummarySchema,
  InvoiceLineSchema,
  InvoicePaymentSchema,
  InvoiceSchema,
  MonthChargeSchema,
  MonthSchema,
  MonthState as MonthStateMessage,
  ObstacleSchema,
  PaymentState as PaymentStateMessage,
  PrepaidCreditSummarySchema,
  VerifyMonthResponseSchema,
  type Adjustment as AdjustmentMessage,
  type CloseMonthResponse as CloseMonthResponseMessage,
  type CreditNoteSummary as CreditNoteSummaryMessage,
  type Invoice as InvoiceMessage,
  type InvoiceLine as InvoiceLineMessage,
  type InvoicePayment as InvoicePaymentMessage,
  type Month as MonthMessage,
  type MonthCharge as MonthChargeMessage,
  type Obstacle as ObstacleMessage,
  type PrepaidCreditSummary as PrepaidCreditSummaryMessage,
  type VerifyMonthResponse as VerifyMonthResponseMessage,
} from "./gen/weir/v1/months_pb.js";
import {
  ConcernKind as ConcernKindMessage,
  ConcernSchema,
  GetTrafficResponseSchema,
  LatencySchema,
  ModelTrafficSchema,
  TrafficErrorSchema,
  type Concern as ConcernMessage,
  type GetTrafficResponse as GetTrafficResponseMessage,
  type Latency as LatencyMessage,
  type ModelTraffic as ModelTrafficMessage,
  type TrafficError as TrafficErrorMessage,
} from "./gen/weir/v1/operation_pb.js";
import {
  CreditGrantSchema,
  GetCreditBalanceResponseSchema,
  ListPlansResponseSchema,
  PlanAssignmentSchema,
  PlanConfigurationSchema,
  PlanSchema,
  SimulatedCustomerSchema,
  SimulatedModelSchema,
  type CreditGrant as CreditGrantMessage,
  type GetCreditBalanceResponse as GetCreditBalanceResponseMessage,
  type ListPlansResponse as ListPlansResponseMessage,
  type Plan as PlanMessage,
  type PlanAssignment as PlanAssignmentMessage,
  type SimulatedCustomer as SimulatedCustomerMessage,
  type SimulatedModel as SimulatedModelMessage,
} from "./gen/weir/v1/plans_pb.js";
import {
  AppliedPriceSchema,
  AppliedPrice_Source as AppliedPrice_SourceMessage,
  ListPricesResponseSchema,
  PriceVersionSchema,
  type AppliedPrice as AppliedPriceMessage,
  type ListPricesResponse as ListPricesResponseMessage,
  type PriceVersion as PriceVersionMessage,
} from "./gen/weir/v1/prices_pb.js";
import {
  DrainReplicaResponseSchema,
  ListReplicasResponseSchema,
  ReplicaDrainSchema,
  ReplicaSchema,
  ReplicaState as ReplicaStateMessage,
  UndrainReplicaResponseSchema,
  type DrainReplicaResponse as DrainReplicaResponseMessage,
  type ListReplicasResponse as ListReplicasResponseMessage,
  type Replica as ReplicaMessage,
  type ReplicaDrain as ReplicaDrainMessage,
  type UndrainReplicaResponse as UndrainReplicaResponseMessage,
} from "./gen/weir/v1/replicas_pb.js";
import {
  ReplicaRentalSchema,
  ResalePriceSchema,
  ResaleStatementLineSchema,
  ResaleStatementSchema,
  type ReplicaRental as ReplicaRentalMessage,
  type ResalePrice as ResalePriceMessage,
  type ResaleStatement as ResaleStatementMessage,
  type ResaleStatementLine as ResaleStatementLineMessage,
} from "./gen/weir/v1/resale_pb.js";
import {
  TokenIssuerSchema,
  TokenProjectSchema,
  TokenRevocationSchema,
  type TokenIssuer as TokenIssuerMessage,
  type TokenProject as TokenProjectMessage,
  type TokenRevocation as TokenRevocationMessage,
} from "./gen/weir/v1/tokens_pb.js";
import {
  BillingProfileSchema,
  QuotaStatusSchema,
  QuotaSubject as QuotaSubjectMessage,
  TimingsSchema,
  UsageSchema,
  type BillingProfile as BillingProfileMessage,
  type QuotaStatus as QuotaStatusMessage,
  type Timings as TimingsMessage,
  type Usage as UsageMessage,
} from "./gen/weir/v1/types_pb.js";
import {
  GetForecastResponseSchema,
  GetOwnUsageResponseSchema,
  GetUsageResponseSchema,
  UsageRowSchema,
  UsageShareSchema,
  type GetForecastResponse as GetForecastResponseMessage,
  type GetOwnUsageResponse as GetOwnUsageResponseMessage,
  type GetUsageResponse as GetUsageResponseMessage,
  type UsageRow as UsageRowMessage,
  type UsageShare as UsageShareMessage,
} from "./gen/weir/v1/usage_reports_pb.js";
import {
  type AcceptedInvitation,
  type Adjustment,
  type AdjustmentState,
  type Alert,
  type AlertDelivery,
  type AlertDeliveryState,
  type AlertInvoice,
  type AlertKey,
  type AlertWebhook,
  type ApiKey,
  type AppliedConfiguration,
  type AppliedFleet,
  type AppliedPrice,
  type AuditEntry,
  type AuditPage,
  type BillingProfile,
  type ChangeAction,
  type ChargeKind,
  type ClosedMonth,
  type ClosedOrganization,
  type ClosedProject,
  type Closure,
  type ClosureEffects,
  type Concern,
  type ConcernKind,
  type ConfigurationChange,
  type ConfigurationViolation,
  type CreatedAlertWebhook,
  type CreatedApiKey,
  type CreatedInvitation,
  type CreditBalance,
  type CreditGrant,
  type CreditNoteSummary,
  type DrainedReplica,
  type EndUser,
  type EndUserLimits,
  type EndUserState,
  type ErasedEndUser,
  type ErasedPerson,
  type FieldChange,
  type FleetChange,
  type FleetProcess,
  type FleetVersion,
  type FleetViolation,
  type Generation,
  type GenerationState,
  type Invitation,
  type Invoice,
  type InvoiceLine,
  type InvoicePayment,
  type KeyChange,
  type KeyRestrictions,
  type KillResult,
  type KilledRequest,
  type Latency,
  type LiveOrganization,
  type LiveRequest,
  type LiveView,
  type Member,
  type Model,
  type ModelTask,
  type ModelTraffic,
  type ModelVersion,
  type Month,
  type MonthCharge,
  type MonthReport,
  type MonthReportLine,
  type MonthState,
  type MonthVerification,
  type Obstacle,
  type Organization,
  type PaymentState,
  type Person,
  type Plan,
  type PlanAssignment,
  type PlanList,
  type PrepaidCredit,
  type PreviewedDay,
  type PreviewedMember,
  type Price,
  type PriceList,
  type PriceSource,
  type PriceVersion,
  type Project,
  type ProvisionedGroup,
  type QuotaPreview,
  type QuotaStatus,
  type QuotaSubject,
  type Quote,
  type Reconciliation,
  type RecordedRequest,
  type RefusedField,
  type RemainingCredit,
  type RemovedMember,
  type Replica,
  type ReplicaDrain,
  type ReplicaList,
  type ReplicaRental,
  type ReplicaState,
  type RequestCounts,
  type RequestPhase,
  type ResalePrice,
  type ResaleStatement,
  type ResaleStatementLine,
  type ResentInvitation,
  type RotatedApiKey,
  type ServedFleet,
  type ServiceAccount,
  type SimulatedCustomer,
  type SimulatedModel,
  type Suspension,
  type Timings,
  type TokenIssuer,
  type TokenKind,
  type TokenLogprob,
  type TokenLogprobs,
  type TokenProject,
  type TokenRevocation,
  type Traffic,
  type TrafficError,
  type UndrainedReplica,
  type Usage,
  type UsageForecast,
  type UsagePage,
  type UsageReport,
  type UsageRow,
  type UsageShare,
} from "./generated_values.js";
import { jsonable } from "./money.js";

export function alertDelivery(
  value: AlertDeliveryMessage = create(AlertDeliverySchema),
): AlertDelivery {
  return {
    state: word<AlertDeliveryState>(AlertDeliveryStateMessage, value.state),
    attemptCount: value.attemptCount,
    attemptTime: date(value.attemptTime),
    endTime: date(value.endTime),
    lastError: value.lastError,
  };
}

export function alertInvoice(
  value: AlertInvoiceMessage = create(AlertInvoiceSchema),
): AlertInvoice {
  return {
    stripeInvoiceId: value.stripeInvoiceId,
    stripeNumber: value.stripeNumber,
    month: value.month,
    amountDue: money(value.amountDue),
    amountPaid: money(value.amountPaid),
    hostedUrl: value.hostedUrl,
  };
}

export function alertKey(
  value: AlertKeyMessage = create(AlertKeySchema),
): AlertKey {
  return {
    prefix: value.prefix,
    name: value.name,
    changedBy: value.changedBy,
    changed: value.changed,
  };
}

export function alert(
  value: AlertMessage = create(AlertSchema),
): Alert {
  return jsonable({
    alertId: value.alertId,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    fireTime: date(value.fireTime),
    quotaId: value.quotaId,
    subject: word<QuotaSubject>(QuotaSubjectMessage, value.subject),
    subjectId: value.subjectId,
    subjectName: value.subjectName,
    model: value.model,
    dimension: dimension(value.dimension),
    threshold: count(value.threshold),
    limitValue: value.limitValue,
    usedValue: value.usedValue,
    windowStartTime: date(value.windowStartTime),
    currencyCode: value.currencyCode,
    delivery: value.delivery && alertDelivery(value.delivery),
    kind: value.kind,
    invoice: value.invoice && alertInvoice(value.invoice),
    key: value.key && alertKey(value.key),
    withinId: value.withinId,
    withinName: value.withinName,
  });
}

export function auditEntry(
  value: AuditEntryMessage = create(AuditEntrySchema),
): AuditEntry {
  return {
    entryId: count(value.entryId),
    createTime: date(value.createTime),
    actor: value.actor,
    action: value.action,
    subjectId: value.subjectId,
    beforeJson: value.beforeJson,
    afterJson: value.afterJson,
    names: value.names,
    actorRole: value.actorRole,
    actorOrganizationId: value.actorOrganizationId,
    actorPersonId: value.actorPersonId,
    actorAddress: value.actorAddress,
  };
}

export function quotaStatus(
  value: QuotaStatusMessage = create(QuotaStatusSchema),
): QuotaStatus {
  return jsonable({
    quotaId: value.quotaId,
    subject: word<QuotaSubject>(QuotaSubjectMessage, value.subject),
    subjectId: value.subjectId,
    model: value.model,
    dimension: dimension(value.dimension),
    limitValue: value.limitValue,
    usedValue: value.usedValue,
    heldValue: value.heldValue,
    remainingValue: value.remainingValue,
    resetTime: date(value.resetTime),
    resetDelayMs: durationMs(value.resetDelay),
    subjectName: value.subjectName,
    enforced: value.enforced,
    wouldRefuseCount: count(value.wouldRefuseCount),
    inputWeightMilli: count(value.inputWeightMilli),
    cachedInputWeightMilli: count(value.cachedInputWeightMilli),
    outputWeightMilli: count(value.outputWeightMilli),
    baseLimitValue: value.baseLimitValue,
    overrideEndTime: date(value.overrideEndTime),
    overrideReason: value.overrideReason,
    binding: value.binding,
    narrowedByQuotaId: value.narrowedByQuotaId,
    forNewKeys: value.forNewKeys,
    alertAt: value.alertAt,
    forEach: value.forEach,
    withinId: value.withinId,
    withinName: value.withinName,
    selectorId: value.selectorId,
    windowMinutes: value.windowMinutes,
    group: value.group,
    setByOrganization: value.setByOrganization,
  });
}

export function endUser(
  value: EndUserMessage = create(EndUserSchema),
): EndUser {
  return {
    endUserId: value.endUserId,
    name: value.name,
    createTime: date(value.createTime),
    lastUseDay: value.lastUseDay,
    state: word<EndUserState>(EndUserStateMessage, value.state),
    monthCost: value.monthCost && money(value.monthCost),
    monthRequestCount: count(value.monthRequestCount),
    tightestQuota: value.tightestQuota && quotaStatus(value.tightestQuota),
  };
}

export function usage(
  value: UsageMessage = create(UsageSchema),
): Usage {
  return {
    inputTokenCount: count(value.inputTokenCount),
    cachedInputTokenCount: count(value.cachedInputTokenCount),
    generatedTokenCount: count(value.generatedTokenCount),
    deliveredTokenCount: count(value.deliveredTokenCount),
    billedTokenCount: count(value.billedTokenCount),
    embeddingTokenCount: count(value.embeddingTokenCount),
    journalledTokenCount: count(value.journalledTokenCount),
    reasoningTokenCount: count(value.reasoningTokenCount),
  };
}

export function timings(
  value: TimingsMessage = create(TimingsSchema),
): Timings {
  return {
    authMs: value.authMs,
    tokenizeMs: value.tokenizeMs,
    admissionMs: value.admissionMs,
    queueMs: value.queueMs,
    coldStartMs: value.coldStartMs,
    prefillMs: value.prefillMs,
    decodeMs: value.decodeMs,
    clientStallMs: value.clientStallMs,
    settleMs: value.settleMs,
    ttftMs: value.ttftMs,
    totalMs: value.totalMs,
    itlP50Ms: value.itlP50Ms,
    itlP99Ms: value.itlP99Ms,
    itlMaxMs: value.itlMaxMs,
    tokensPerSecond: value.tokensPerSecond,
  };
}

export function generation(
  value: GenerationMessage = create(GenerationSchema),
): Generation {
  return {
    requestId: value.requestId,
    state: name<GenerationState>(Generation_StateMessage, value.state),
    model: value.model,
    admitTime: date(value.admitTime),
    settleTime: date(value.settleTime),
    usage: usage(value.usage),
    cost: value.cost && money(value.cost),
    timings: value.timings && timings(value.timings),
    outcome: value.outcome,
    labels: value.labels,
    migrationCount: value.migrationCount,
    endUser: value.endUser,
  };
}

export function usageForecast(
  value: GetForecastResponseMessage = create(GetForecastResponseSchema),
): UsageForecast {
  return {
    organizationName: value.organizationName,
    month: value.month,
    timeZone: value.timeZone,
    asOfTime: date(value.asOfTime),
    monthToDate: money(value.monthToDate),
    expected: value.expected && money(value.expected),
    low: value.low && money(value.low),
    high: value.high && money(value.high),
    confidencePercent: value.confidencePercent,
    completeDayCount: value.completeDayCount,
    method: value.method,
    warnings: value.warnings,
  };
}

export function usageShare(
  value: UsageShareMessage = create(UsageShareSchema),
): UsageShare {
  return {
    requestCount: count(value.requestCount),
    tokenCount: count(value.tokenCount),
    amount: money(value.amount),
  };
}

export function usageRow(
  value: UsageRowMessage = create(UsageRowSchema),
): UsageRow {
  return {
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    day: value.day,
    projectId: value.projectId,
    projectName: value.projectName,
    apiKeyId: value.apiKeyId,
    apiKeyName: value.apiKeyName,
    apiKeyPrefix: value.apiKeyPrefix,
    model: value.model,
    requestId: value.requestId,
    outcome: value.outcome,
    settleTime: date(value.settleTime),
    late: value.late,
    requestCount: count(value.requestCount),
    inputTokenCount: count(value.inputTokenCount),
    cachedInputTokenCount: count(value.cachedInputTokenCount),
    outputTokenCount: count(value.outputTokenCount),
    cancelled: usageShare(value.cancelled),
    limited: usageShare(value.limited),
    failed: usageShare(value.failed),
    amount: money(value.amount),
    pendingAmount: money(value.pendingAmount),
    embeddingTokenCount: count(value.embeddingTokenCount),
    migrationCount: count(value.migrationCount),
    reasoningTokenCount: count(value.reasoningTokenCount),
    cost: money(value.cost),
    hour: value.hour,
    endUserId: value.endUserId,
    endUser: value.endUser,
    labelValue: value.labelValue,
  };
}

export function usageReport(
  value: GetOwnUsageResponseMessage = create(GetOwnUsageResponseSchema),
): UsageReport {
  return {
    rows: value.rows.map((each) => usageRow(each)),
    total: usageRow(value.total),
    firstDay: value.firstDay,
    lastDay: value.lastDay,
    timeZone: value.timeZone,
  };
}

export function usagePage(
  value: GetUsageResponseMessage = create(GetUsageResponseSchema),
): UsagePage {
  return {
    rows: value.rows.map((each) => usageRow(each)),
    total: value.total && usageRow(value.total),
    timeZone: value.timeZone,
  };
}

export function invitation(
  value: InvitationMessage = create(InvitationSchema),
): Invitation {
  return {
    invitationId: value.invitationId,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    projectId: value.projectId,
    projectName: value.projectName,
    email: value.email,
    role: value.role,
    createTime: date(value.createTime),
    expireTime: date(value.expireTime),
  };
}

export function invoiceLine(
  value: InvoiceLineMessage = create(InvoiceLineSchema),
): InvoiceLine {
  return jsonable({
    kind: value.kind,
    description: value.description,
    exactAmount: money(value.exactAmount),
    amount: money(value.amount),
    model: value.model,
    priceVersion: count(value.priceVersion),
    tokenKind: value.tokenKind,
    tokenCount: count(value.tokenCount),
    unitPricePicos: value.unitPricePicos,
    usageMonth: value.usageMonth,
    sourceId: value.sourceId,
  });
}

export function invoicePayment(
  value: InvoicePaymentMessage = create(InvoicePaymentSchema),
): InvoicePayment {
  return {
    stripeInvoiceId: value.stripeInvoiceId,
    stripeNumber: value.stripeNumber,
    state: word<PaymentState>(PaymentStateMessage, value.state),
    amountDue: money(value.amountDue),
    amountPaid: money(value.amountPaid),
    hostedUrl: value.hostedUrl,
    finalizeTime: date(value.finalizeTime),
    payTime: date(value.payTime),
    failureTime: date(value.failureTime),
  };
}

export function invoice(
  value: InvoiceMessage = create(InvoiceSchema),
): Invoice {
  return {
    number: value.number,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    month: value.month,
    issueTime: date(value.issueTime),
    issuedBy: value.issuedBy,
    lines: value.lines.map((each) => invoiceLine(each)),
    exactTotal: money(value.exactTotal),
    carriedIn: money(value.carriedIn),
    carriedOut: money(value.carriedOut),
    total: money(value.total),
    credited: money(value.credited),
    taxNote: value.taxNote,
    payments: value.payments.map((each) => invoicePayment(each)),
  };
}

export function keyChange(
  value: KeyChangeMessage = create(KeyChangeSchema),
): KeyChange {
  return {
    act: value.act,
    actor: value.actor,
    changeTime: date(value.changeTime),
  };
}

export function keyRestrictions(
  value: KeyRestrictionsMessage = create(KeyRestrictionsSchema),
): KeyRestrictions {
  return {
    prefix: value.prefix,
    scopes: value.scopes,
    models: value.models,
    maxInputTokens: count(value.maxInputTokens) || undefined,
    maxOutputTokens: count(value.maxOutputTokens) || undefined,
    secretExpireTime: date(value.secretExpireTime),
    allowedNetworks: value.allowedNetworks,
    strictParameters: value.strictParameters,
    latestChange: value.latestChange && keyChange(value.latestChange),
    group: value.group,
    role: value.role,
  };
}

export function plan(
  value: PlanMessage = create(PlanSchema),
): Plan {
  return {
    configuration: value.configuration && toJson(PlanConfigurationSchema, value.configuration),
    version: count(value.version),
    createTime: date(value.createTime),
  };
}

export function planAssignment(
  value: PlanAssignmentMessage = create(PlanAssignmentSchema),
): PlanAssignment {
  return {
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    firstMonth: value.firstMonth,
    plan: value.plan,
    version: count(value.version),
    assignedBy: value.assignedBy,
  };
}

export function planList(
  value: ListPlansResponseMessage = create(ListPlansResponseSchema),
): PlanList {
  return {
    plans: value.plans.map((each) => plan(each)),
    assignments: value.assignments.map((each) => planAssignment(each)),
  };
}

export function price(
  value: PriceMessage = create(PriceSchema),
): Price {
  return jsonable({
    version: count(value.version),
    currencyCode: value.currencyCode,
    inputPicosPerToken: value.inputPicosPerToken,
    cachedInputPicosPerToken: value.cachedInputPicosPerToken,
    outputPicosPerToken: value.outputPicosPerToken,
    effectiveTime: date(value.effectiveTime),
    embeddingPicosPerToken: value.embeddingPicosPerToken,
    tier: value.tier === ServiceTier.BATCH ? "batch" : "interactive",
    own: value.own,
    reasoningPicosPerToken: value.reasoningPicosPerToken,
  });
}

export function modelVersion(
  value: ModelVersionMessage = create(ModelVersionSchema),
): ModelVersion {
  return {
    version: value.version,
    share: value.share,
  };
}

export function refusedField(
  value: RefusedFieldMessage = create(RefusedFieldSchema),
): RefusedField {
  return {
    field: value.field,
    values: value.values,
  };
}

export function model(
  value: ModelMessage = create(ModelSchema),
): Model {
  return {
    name: value.name,
    architecture: value.architecture,
    contextWindowTokens: count(value.contextWindowTokens),
    vocabularySize: count(value.vocabularySize),
    engine: value.engine,
    price: value.price && price(value.price),
    tierPrices: value.tierPrices.map((each) => price(each)),
    task: name<ModelTask>(ModelTaskMessage, value.task),
    embeddingDimension: count(value.embeddingDimension),
    embeddingInputCountMax: count(value.embeddingInputCountMax),
    aliases: value.aliases,
    versions: value.versions.map((each) => modelVersion(each)),
    readyReplicaCount: value.readyReplicaCount,
    replicaCount: value.replicaCount,
    drainedReplicaCount: value.drainedReplicaCount,
    kernels: value.kernels,
    refusedFields: value.refusedFields.map((each) => refusedField(each)),
    countsFromUsage: value.countsFromUsage,
  };
}

export function quote(
  value: QuoteResponseMessage = create(QuoteResponseSchema),
): Quote {
  return {
    inputTokenCount: count(value.inputTokenCount),
    predictedCachedTokenCount: count(value.predictedCachedTokenCount),
    maxOutputTokenCount: count(value.maxOutputTokenCount),
    expectedOutputTokenCount: count(value.expectedOutputTokenCount),
    worstCaseCost: money(value.worstCaseCost),
    expectedCost: money(value.expectedCost),
    priceVersion: count(value.priceVersion),
    wouldAdmit: value.wouldAdmit,
    retryHelps: value.retryHelps,
    retryAfterMs: durationMs(value.retryDelay),
    failingQuotas: value.failingQuotas.map((each) => quotaStatus(each)),
    quotas: value.quotas.map((each) => quotaStatus(each)),
  };
}

export function resalePrice(
  value: ResalePriceMessage = create(ResalePriceSchema),
): ResalePrice {
  return jsonable({
    version: count(value.version),
    model: value.model,
    markupMilli: count(value.markupMilli),
    inputPicosPerToken: value.inputPicosPerToken || undefined,
    cachedInputPicosPerToken: value.cachedInputPicosPerToken || undefined,
    outputPicosPerToken: value.outputPicosPerToken || undefined,
    reasoningPicosPerToken: value.reasoningPicosPerToken || undefined,
    embeddingPicosPerToken: value.embeddingPicosPerToken || undefined,
    requestPicos: value.requestPicos,
    withdrawn: value.withdrawn,
    effectiveTime: date(value.effectiveTime),
    replicaHourPicos: value.replicaHourPicos,
  });
}

export function resaleStatementLine(
  value: ResaleStatementLineMessage = create(ResaleStatementLineSchema),
): ResaleStatementLine {
  return {
    model: value.model,
    item: value.item,
    quantity: count(value.quantity),
    cost: money(value.cost),
    amount: money(value.amount),
    resalePriceVersion: count(value.resalePriceVersion),
    lateMonth: value.lateMonth,
  };
}

export function resaleStatement(
  value: ResaleStatementMessage = create(ResaleStatementSchema),
): ResaleStatement {
  return {
    endUser: value.endUser,
    endUserId: value.endUserId,
    month: value.month,
    state: value.state,
    requestCount: count(value.requestCount),
    tokenCount: count(value.tokenCount),
    cost: money(value.cost),
    amount: money(value.amount),
    carriedIn: money(value.carriedIn),
    totalRounded: money(value.totalRounded),
    lines: value.lines.map((each) => resaleStatementLine(each)),
    replicaSecondCount: count(value.replicaSecondCount),
  };
}

export function replicaRental(
  value: ReplicaRentalMessage = create(ReplicaRentalSchema),
): ReplicaRental {
  return {
    rentalId: count(value.rentalId),
    endUser: value.endUser,
    endUserId: value.endUserId,
    model: value.model,
    replicaCount: count(value.replicaCount),
    startTime: date(value.startTime),
    endTime: date(value.endTime),
  };
}

export function simulatedModel(
  value: SimulatedModelMessage = create(SimulatedModelSchema),
): SimulatedModel {
  return {
    model: value.model,
    tokenCount: count(value.tokenCount),
    oldAmount: money(value.oldAmount),
    newAmount: money(value.newAmount),
    difference: money(value.difference),
  };
}

export function simulatedCustomer(
  value: SimulatedCustomerMessage = create(SimulatedCustomerSchema),
): SimulatedCustomer {
  return {
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    tokenCount: count(value.tokenCount),
    oldAmount: money(value.oldAmount),
    newAmount: money(value.newAmount),
    difference: money(value.difference),
    oldPlan: value.oldPlan,
    newPlan: value.newPlan,
    models: value.models.map((each) => simulatedModel(each)),
  };
}

export function tokenLogprob(
  value: TokenLogprobMessage = create(TokenLogprobSchema),
): TokenLogprob {
  return {
    tokenId: value.tokenId,
    logprob: value.logprob,
  };
}

export function tokenLogprobs(
  value: TokenLogprobsMessage = create(TokenLogprobsSchema),
): TokenLogprobs {
  return {
    chosen: tokenLogprob(value.chosen),
    top: value.top.map((each) => tokenLogprob(each)),
  };
}

export function billingProfile(
  value: BillingProfileMessage = create(BillingProfileSchema),
): BillingProfile {
  return {
    emails: value.emails,
    legalName: value.legalName,
    addressLine1: value.addressLine1,
    addressLine2: value.addressLine2,
    city: value.city,
    postalCode: value.postalCode,
    state: value.state,
    country: value.country,
    taxId: value.taxId,
    language: value.language,
  };
}

export function suspension(
  value: SuspensionMessage = create(SuspensionSchema),
): Suspension {
  return {
    reason: value.reason,
    createTime: date(value.createTime),
    byOperator: value.byOperator,
  };
}

export function closure(
  value: ClosureMessage = create(ClosureSchema),
): Closure {
  return {
    reason: value.reason,
    closeTime: date(value.closeTime),
    byOperator: value.byOperator,
    remainingCredit: word<RemainingCredit>(RemainingCreditMessage, value.remainingCredit),
    finalMonth: value.finalMonth,
    isFinalMonthClosed: value.isFinalMonthClosed,
  };
}

export function organization(
  value: OrganizationMessage = create(OrganizationSchema),
): Organization {
  return {
    organizationId: value.organizationId,
    name: value.name,
    currencyCode: value.currencyCode,
    createTime: date(value.createTime),
    billingProfile: value.billingProfile && billingProfile(value.billingProfile),
    queueWeightMilli: count(value.queueWeightMilli),
    suspension: value.suspension && suspension(value.suspension),
    region: value.region,
    closure: value.closure && closure(value.closure),
  };
}

export function closureEffects(
  value: ClosureEffectsMessage = create(ClosureEffectsSchema),
): ClosureEffects {
  return {
    runningRequestCount: count(value.runningRequestCount),
    activeKeyCount: count(value.activeKeyCount),
    limitCount: count(value.limitCount),
    overriddenLimitCount: count(value.overriddenLimitCount),
    openProjectCount: count(value.openProjectCount),
    openRentalCount: count(value.openRentalCount),
    hasWebhook: value.hasWebhook,
    openMonths: value.openMonths,
    unbilled: value.unbilled && money(value.unbilled),
    remainingCredit: value.remainingCredit && money(value.remainingCredit),
  };
}

export function closedOrganization(
  value: CloseOrganizationResponseMessage = create(CloseOrganizationResponseSchema),
): ClosedOrganization {
  return {
    organization: organization(value.organization),
    effects: closureEffects(value.effects),
  };
}

export function project(
  value: ProjectMessage = create(ProjectSchema),
): Project {
  return {
    projectId: value.projectId,
    organizationId: value.organizationId,
    name: value.name,
    createTime: date(value.createTime),
    suspension: value.suspension && suspension(value.suspension),
    closure: value.closure && closure(value.closure),
  };
}

export function closedProject(
  value: CloseProjectResponseMessage = create(CloseProjectResponseSchema),
): ClosedProject {
  return {
    project: project(value.project),
    effects: closureEffects(value.effects),
  };
}

export function apiKey(
  value: ApiKeyMessage = create(ApiKeySchema),
): ApiKey {
  return {
    apiKeyId: value.apiKeyId,
    projectId: value.projectId,
    name: value.name,
    prefix: value.prefix,
    scopes: value.scopes,
    createTime: date(value.createTime),
    expireTime: date(value.expireTime),
    revokeTime: date(value.revokeTime),
    organizationId: value.organizationId,
    overlapEndTime: date(value.overlapEndTime),
    models: value.models,
    lastUseTime: date(value.lastUseTime),
    useTrackedSinceTime: date(value.useTrackedSinceTime),
    maxInputTokens: count(value.maxInputTokens) || undefined,
    maxOutputTokens: count(value.maxOutputTokens) || undefined,
    allowedNetworks: value.allowedNetworks,
    organizationName: value.organizationName,
    projectName: value.projectName,
    strictParameters: value.strictParameters,
    group: value.group,
    role: value.role,
    isBound: value.isBound,
    personId: value.personId,
    serviceAccountId: value.serviceAccountId,
    creatorId: value.creatorId,
  };
}

export function createdApiKey(
  value: CreateApiKeyResponseMessage = create(CreateApiKeyResponseSchema),
): CreatedApiKey {
  return {
    apiKey: apiKey(value.apiKey),
    secret: value.secret,
    existed: value.existed,
  };
}

export function rotatedApiKey(
  value: RotateApiKeyResponseMessage = create(RotateApiKeyResponseSchema),
): RotatedApiKey {
  return {
    apiKey: apiKey(value.apiKey),
    secret: value.secret,
    overlapEndTime: date(value.overlapEndTime),
  };
}

export function previewedDay(
  value: PreviewedDayMessage = create(PreviewedDaySchema),
): PreviewedDay {
  return {
    day: value.day,
    requestCount: count(value.requestCount),
    refusedCount: count(value.refusedCount),
    shortenedCount: count(value.shortenedCount),
  };
}

export function previewedMember(
  value: PreviewedMemberMessage = create(PreviewedMemberSchema),
): PreviewedMember {
  return {
    name: value.name,
    requestCount: count(value.requestCount),
    refusedCount: count(value.refusedCount),
    shortenedCount: count(value.shortenedCount),
  };
}

export function quotaPreview(
  value: PreviewQuotaResponseMessage = create(PreviewQuotaResponseSchema),
): QuotaPreview {
  return {
    startTime: date(value.startTime),
    endTime: date(value.endTime),
    requestCount: count(value.requestCount),
    refusedCount: count(value.refusedCount),
    shortenedCount: count(value.shortenedCount),
    firstRefusalTime: date(value.firstRefusalTime),
    days: value.days.map((each) => previewedDay(each)),
    members: value.members.map((each) => previewedMember(each)),
    memberCount: count(value.memberCount),
    refusedMemberCount: count(value.refusedMemberCount),
  };
}

export function priceVersion(
  value: PriceVersionMessage = create(PriceVersionSchema),
): PriceVersion {
  return jsonable({
    version: count(value.version),
    model: value.model,
    currencyCode: value.currencyCode,
    tier: value.tier === ServiceTier.BATCH ? "batch" : "interactive",
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    inputPicosPerToken: value.inputPicosPerToken,
    cachedInputPicosPerToken: value.cachedInputPicosPerToken,
    outputPicosPerToken: value.outputPicosPerToken,
    embeddingPicosPerToken: value.embeddingPicosPerToken,
    multiplierMilli: count(value.multiplierMilli),
    effectiveTime: date(value.effectiveTime),
    withdrawn: value.withdrawn,
    reasoningPicosPerToken: value.reasoningPicosPerToken,
  });
}

export function appliedPrice(
  value: AppliedPriceMessage = create(AppliedPriceSchema),
): AppliedPrice {
  return {
    model: value.model,
    tier: value.tier === ServiceTier.BATCH ? "batch" : "interactive",
    source: word<PriceSource>(AppliedPrice_SourceMessage, value.source),
    version: priceVersion(value.version),
  };
}

export function priceList(
  value: ListPricesResponseMessage = create(ListPricesResponseSchema),
): PriceList {
  return {
    prices: value.prices.map((each) => appliedPrice(each)),
    versions: value.versions.map((each) => priceVersion(each)),
  };
}

export function creditGrant(
  value: CreditGrantMessage = create(CreditGrantSchema),
): CreditGrant {
  return {
    grantId: value.grantId,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    amount: money(value.amount),
    spent: money(value.spent),
    expired: money(value.expired),
    remaining: money(value.remaining),
    firstMonth: value.firstMonth,
    lastMonth: value.lastMonth,
    reason: value.reason,
    grantedBy: value.grantedBy,
    createTime: date(value.createTime),
    refunded: money(value.refunded),
  };
}

export function creditBalance(
  value: GetCreditBalanceResponseMessage = create(GetCreditBalanceResponseSchema),
): CreditBalance {
  return {
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    prepaid: value.prepaid,
    remaining: money(value.remaining),
    unbilled: money(value.unbilled),
    held: money(value.held),
    available: money(value.available),
  };
}

export function auditPage(
  value: ExportAuditEntriesResponseMessage = create(ExportAuditEntriesResponseSchema),
): AuditPage {
  return {
    entries: value.entries.map((each) => auditEntry(each)),
    position: count(value.position),
  };
}

export function liveRequest(
  value: LiveRequestMessage = create(LiveRequestSchema),
): LiveRequest {
  return {
    requestId: value.requestId,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    projectId: value.projectId,
    projectName: value.projectName,
    apiKeyId: value.apiKeyId,
    apiKeyPrefix: value.apiKeyPrefix,
    model: value.model,
    phase: word<RequestPhase>(RequestPhaseMessage, value.phase),
    ageMs: durationMs(value.age),
    inputTokenCount: count(value.inputTokenCount),
    cachedInputTokenCount: count(value.cachedInputTokenCount),
    deliveredTokenCount: count(value.deliveredTokenCount),
    tokensPerSecond: value.tokensPerSecond,
    leasedTokenCount: count(value.leasedTokenCount),
    admitTime: date(value.admitTime),
    expireTime: date(value.expireTime),
    processId: value.processId,
    processName: value.processName,
    endUser: value.endUser,
    labels: value.labels,
  };
}

export function liveOrganization(
  value: LiveOrganizationMessage = create(LiveOrganizationSchema),
): LiveOrganization {
  return {
    organizationId: value.organizationId,
    name: value.name,
    requestCount: count(value.requestCount),
    holdCount: count(value.holdCount),
    heldTokenCount: count(value.heldTokenCount),
    tokensPerSecond: value.tokensPerSecond,
  };
}

export function liveView(
  value: ListLiveRequestsResponseMessage = create(ListLiveRequestsResponseSchema),
): LiveView {
  return {
    requests: value.requests.map((each) => liveRequest(each)),
    organizations: value.organizations.map((each) => liveOrganization(each)),
    requestCount: count(value.requestCount),
    unresponsiveProcessIds: value.unresponsiveProcessIds,
  };
}

export function recordedRequest(
  value: GetRequestResponseMessage = create(GetRequestResponseSchema),
): RecordedRequest {
  return {
    generation: generation(value.generation),
    organizationName: value.organizationName,
    projectName: value.projectName,
    apiKeyPrefix: value.apiKeyPrefix,
  };
}

export function killedRequest(
  value: KillRequestResponseMessage = create(KillRequestResponseSchema),
): KilledRequest {
  return {
    result: word<KillResult>(KillRequestResponse_ResultMessage, value.result),
    generation: value.generation && generation(value.generation),
    expireTime: date(value.expireTime),
  };
}

export function replica(
  value: ReplicaMessage = create(ReplicaSchema),
): Replica {
  return {
    model: value.model,
    replica: value.replica,
    region: value.region,
    state: word<ReplicaState>(ReplicaStateMessage, value.state),
    reason: value.reason,
    drained: value.drained,
    requestCount: count(value.requestCount),
    outstandingTokenCount: count(value.outstandingTokenCount),
    processId: value.processId,
    processName: value.processName,
  };
}

export function replicaDrain(
  value: ReplicaDrainMessage = create(ReplicaDrainSchema),
): ReplicaDrain {
  return {
    model: value.model,
    replica: value.replica,
    reason: value.reason,
    drainTime: date(value.drainTime),
    moveAfterMs: durationMs(value.moveAfter),
  };
}

export function replicaList(
  value: ListReplicasResponseMessage = create(ListReplicasResponseSchema),
): ReplicaList {
  return {
    replicas: value.replicas.map((each) => replica(each)),
    drains: value.drains.map((each) => replicaDrain(each)),
    unresponsiveProcessIds: value.unresponsiveProcessIds,
  };
}

export function drainedReplica(
  value: DrainReplicaResponseMessage = create(DrainReplicaResponseSchema),
): DrainedReplica {
  return {
    drain: replicaDrain(value.drain),
    replicas: value.replicas.map((each) => replica(each)),
    unresponsiveProcessIds: value.unresponsiveProcessIds,
  };
}

export function undrainedReplica(
  value: UndrainReplicaResponseMessage = create(UndrainReplicaResponseSchema),
): UndrainedReplica {
  return {
    undrained: value.undrained,
    replicas: value.replicas.map((each) => replica(each)),
    unresponsiveProcessIds: value.unresponsiveProcessIds,
  };
}

export function alertWebhook(
  value: AlertWebhookMessage = create(AlertWebhookSchema),
): AlertWebhook {
  return {
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    url: value.url,
    createTime: date(value.createTime),
    pendingCount: count(value.pendingCount),
    failureCount: value.failureCount,
    pauseEndTime: date(value.pauseEndTime),
    lastError: value.lastError,
  };
}

export function createdAlertWebhook(
  value: SetAlertWebhookResponseMessage = create(SetAlertWebhookResponseSchema),
): CreatedAlertWebhook {
  return {
    webhook: alertWebhook(value.webhook),
    secret: value.secret,
  };
}

export function fieldChange(
  value: FieldChangeMessage = create(FieldChangeSchema),
): FieldChange {
  return {
    field: value.field,
    beforeJson: value.beforeJson || undefined,
    afterJson: value.afterJson || undefined,
  };
}

export function configurationChange(
  value: ConfigurationChangeMessage = create(ConfigurationChangeSchema),
): ConfigurationChange {
  return {
    action: word<ChangeAction>(ConfigurationChange_ActionMessage, value.action),
    kind: value.kind,
    path: value.path,
    quota: value.quota && toJson(QuotaConfigurationSchema, value.quota),
    fields: value.fields.map((each) => fieldChange(each)),
    apiKeyPrefix: value.apiKeyPrefix,
    secret: value.secret,
  };
}

export function configurationViolation(
  value: ConfigurationViolationMessage = create(ConfigurationViolationSchema),
): ConfigurationViolation {
  return {
    field: value.field,
    description: value.description,
  };
}

export function appliedConfiguration(
  value: ApplyConfigurationResponseMessage = create(ApplyConfigurationResponseSchema),
): AppliedConfiguration {
  return {
    changes: value.changes.map((each) => configurationChange(each)),
    kept: value.kept.map((each) => configurationChange(each)),
    violations: value.violations.map((each) => configurationViolation(each)),
  };
}

export function fleetVersion(
  value: FleetVersionMessage = create(FleetVersionSchema),
): FleetVersion {
  return {
    number: count(value.number),
    document: value.document,
    digest: value.digest,
    actor: value.actor,
    reason: value.reason,
    createTime: date(value.createTime),
  };
}

export function fleetProcess(
  value: FleetProcessMessage = create(FleetProcessSchema),
): FleetProcess {
  return {
    processId: value.processId,
    processName: value.processName,
    number: count(value.number),
    fault: value.fault,
  };
}

export function servedFleet(
  value: GetFleetResponseMessage = create(GetFleetResponseSchema),
): ServedFleet {
  return {
    version: fleetVersion(value.version),
    processes: value.processes.map((each) => fleetProcess(each)),
    unresponsiveProcessIds: value.unresponsiveProcessIds,
  };
}

export function fleetChange(
  value: FleetChangeMessage = create(FleetChangeSchema),
): FleetChange {
  return {
    path: value.path,
    beforeJson: value.beforeJson,
    afterJson: value.afterJson,
  };
}

export function fleetViolation(
  value: FleetViolationMessage = create(FleetViolationSchema),
): FleetViolation {
  return {
    line: value.line,
    location: value.location,
    message: value.message,
  };
}

export function appliedFleet(
  value: ApplyFleetResponseMessage = create(ApplyFleetResponseSchema),
): AppliedFleet {
  return {
    version: fleetVersion(value.version),
    changes: value.changes.map((each) => fleetChange(each)),
    violations: value.violations.map((each) => fleetViolation(each)),
  };
}

export function erasedEndUser(
  value: EraseEndUserResponseMessage = create(EraseEndUserResponseSchema),
): ErasedEndUser {
  return {
    erased: value.erased,
    limitCount: count(value.limitCount),
    labelledRequestCount: count(value.labelledRequestCount),
  };
}

export function createdInvitation(
  value: InviteMemberResponseMessage = create(InviteMemberResponseSchema),
): CreatedInvitation {
  return {
    invitation: invitation(value.invitation),
    token: value.token,
  };
}

export function resentInvitation(
  value: ResendInvitationResponseMessage = create(ResendInvitationResponseSchema),
): ResentInvitation {
  return {
    invitation: invitation(value.invitation),
    token: value.token,
  };
}

export function member(
  value: MemberMessage = create(MemberSchema),
): Member {
  return {
    membershipId: value.membershipId,
    personId: value.personId,
    email: value.email,
    displayName: value.displayName,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    projectId: value.projectId,
    projectName: value.projectName,
    role: value.role,
    apiKeyId: value.apiKeyId,
    keyPrefix: value.keyPrefix,
    createTime: date(value.createTime),
    deactivateTime: date(value.deactivateTime),
  };
}

export function acceptedInvitation(
  value: AcceptInvitationResponseMessage = create(AcceptInvitationResponseSchema),
): AcceptedInvitation {
  return {
    member: member(value.member),
    secret: value.secret,
  };
}

export function removedMember(
  value: RemoveMemberResponseMessage = create(RemoveMemberResponseSchema),
): RemovedMember {
  return {
    revokedKeys: value.revokedKeys,
    keptKeys: value.keptKeys,
  };
}

export function serviceAccount(
  value: ServiceAccountMessage = create(ServiceAccountSchema),
): ServiceAccount {
  return {
    serviceAccountId: value.serviceAccountId,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    name: value.name,
    role: value.role,
    createTime: date(value.createTime),
    keyCount: value.keyCount,
  };
}

export function person(
  value: PersonMessage = create(PersonSchema),
): Person {
  return {
    personId: value.personId,
    email: value.email,
    displayName: value.displayName,
    createTime: date(value.createTime),
    deactivateTime: date(value.deactivateTime),
  };
}

export function tokenProject(
  value: TokenProjectMessage = create(TokenProjectSchema),
): TokenProject {
  return {
    claimValue: value.claimValue,
    projectName: value.projectName,
    apiKeyId: value.apiKeyId,
    prefix: value.prefix,
  };
}

export function tokenIssuer(
  value: TokenIssuerMessage = create(TokenIssuerSchema),
): TokenIssuer {
  return {
    tokenIssuerId: value.tokenIssuerId,
    organizationId: value.organizationId,
    organizationName: value.organizationName,
    issuer: value.issuer,
    audience: value.audience,
    algorithms: value.algorithms,
    keysUrl: value.keysUrl,
    keys: value.keys,
    leewayMs: durationMs(value.leeway),
    lifetimeMaxMs: durationMs(value.lifetimeMax),
    tokenType: value.tokenType,
    requiresId: value.requiresId,
    projectClaim: value.projectClaim,
    endUserClaim: value.endUserClaim,
    modelsClaim: value.modelsClaim,
    maxOutputTokensClaim: value.maxOutputTokensClaim,
    labelClaims: value.labelClaims,
    projects: value.projects.map((each) => tokenProject(each)),
    createTime: date(value.createTime),
    singleUse: value.singleUse,
  };
}

export function tokenRevocation(
  value: TokenRevocationMessage = create(TokenRevocationSchema),
): TokenRevocation {
  return {
    claim: value.claim,
    value: value.value,
    expireTime: date(value.expireTime),
  };
}

export function provisionedGroup(
  value: ProvisionedGroupMessage = create(ProvisionedGroupSchema),
): ProvisionedGroup {
  return {
    groupId: value.groupId,
    group: value.group,
    memberCount: count(value.memberCount),
    role: value.role,
    projectId: value.projectId,
    projectName: value.projectName,
  };
}

export function erasedPerson(
  value: ErasePersonResponseMessage = create(ErasePersonResponseSchema),
): ErasedPerson {
  return {
    personId: value.personId,
    organizations: value.organizations,
    keyCount: count(value.keyCount),
    sessionCount: count(value.sessionCount),
    invitationCount: count(value.invitationCount),
    provisionedUserCount: count(value.provisionedUserCount),
    auditEntryCount: count(value.auditEntryCount),
  };
}

export function latency(
  value: LatencyMessage = create(LatencySchema),
): Latency {
  return {
    p50Ms: value.p50Ms,
    p99Ms: value.p99Ms,
    periodP50Ms: value.periodP50Ms,
    periodP99Ms: value.periodP99Ms,
  };
}

export function trafficError(
  value: TrafficErrorMessage = create(TrafficErrorSchema),
): TrafficError {
  return {
    reason: value.reason,
    count: count(value.count),
  };
}

export function modelTraffic(
  value: ModelTrafficMessage = create(ModelTrafficSchema),
): ModelTraffic {
  return {
    model: value.model,
    requestCounts: value.requestCounts.map(count),
    errorCounts: value.errorCounts.map(count),
    inputTokenCounts: value.inputTokenCounts.map(count),
    cachedInputTokenCounts: value.cachedInputTokenCounts.map(count),
    outputTokenCounts: value.outputTokenCounts.map(count),
    embeddingTokenCounts: value.embeddingTokenCounts.map(count),
    runningCounts: value.runningCounts,
    waitingCounts: value.waitingCounts,
    firstToken: latency(value.firstToken),
    interToken: latency(value.interToken),
    errors: value.errors.map((each) => trafficError(each)),
  };
}

export function traffic(
  value: GetTrafficResponseMessage = create(GetTrafficResponseSchema),
): Traffic {
  return {
    startTime: date(value.startTime),
    stepMs: durationMs(value.step),
    stepCount: value.stepCount,
    total: modelTraffic(value.total),
    models: value.models.map((each) => modelTraffic(each)),
  };
}

export function concern(
  value: ConcernMessage = create(ConcernSchema),
): Concern {
  return {
    kind: word<ConcernKind>(ConcernKindMessage, value.kind),
    organizationName: value.organizationName,
    subject: value.subject,
    count: count(value.count),
    ageMs: durationMs(value.age),
    detail: value.detail,
  };
}

export function monthReportLine(
  value: MonthReportLineMessage = create(MonthReportLineSchema),
): MonthReportLine {
  return jsonable({
    model: value.model,
    tokenKind: word<TokenKind>(TokenKindMessage, value.tokenKind),
    priceVersion: count(value.priceVersion),
    requestCount: count(value.requestCount),
    tokenCount: count(value.tokenCount),
    cancelledTokenCount: count(value.cancelledTokenCount),
    unitPricePicos: value.unitPricePicos,
    amount: money(value.amount),
    lateMonth: value.lateMonth,
    roundedAmount: value.roundedAmount && money(value.roundedAmount),
    tier: value.tier,
  });
}

export function requestCounts(
  value: RequestCountsMessage = create(RequestCountsSchema),
): RequestCounts {
  return {
    totalCount: count(value.totalCount),
    completedCount: count(value.completedCount),
    cancelledCount: count(value.cancelledCount),
    limitedCount: count(value.limitedCount),
    failedCount: count(value.failedCount),
  };
}

export function reconciliation(
  value: ReconciliationMessage = create(ReconciliationSchema),
): Reconciliation {
  return {
    usageTokenCount: count(value.usageTokenCount),
    ledgerTokenCount: count(value.ledgerTokenCount),
    unratedTokenCount: count(value.unratedTokenCount),
    balanced: value.balanced,
  };
}

export function monthCharge(
  value: MonthChargeMessage = create(MonthChargeSchema),
): MonthCharge {
  return {
    kind: word<ChargeKind>(ChargeKindMessage, value.kind),
    description: value.description,
    amount: money(value.amount),
    roundedAmount: money(value.roundedAmount),
    model: value.model,
    tokenCount: count(value.tokenCount),
    sourceId: value.sourceId,
  };
}

export function prepaidCredit(
  value: PrepaidCreditSummaryMessage = create(PrepaidCreditSummarySchema),
): PrepaidCredit {
  return {
    granted: money(value.granted),
    expired: money(value.expired),
    remaining: money(value.remaining),
    refunded: money(value.refunded),
  };
}

export function creditNoteSummary(
  value: CreditNoteSummaryMessage = create(CreditNoteSummarySchema),
): CreditNoteSummary {
  return {
    number: value.number,
    invoiceNumber: value.invoiceNumber,
    amount: money(value.amount),
    reason: value.reason,
  };
}

export function monthReport(
  value: GetMonthReportResponseMessage = create(GetMonthReportResponseSchema),
): MonthReport {
  return {
    organizationName: value.organizationName,
    organizationId: value.organizationId,
    month: value.month,
    lines: value.lines.map((each) => monthReportLine(each)),
    requestCounts: requestCounts(value.requestCounts),
    total: money(value.total),
    totalRounded: money(value.totalRounded),
    unratedEventCount: count(value.unratedEventCount),
    reconciliation: reconciliation(value.reconciliation),
    state: word<MonthState>(MonthStateMessage, value.state),
    invoiceNumber: value.invoiceNumber,
    closeTime: date(value.closeTime),
    closedBy: value.closedBy,
    charges: value.charges.map((each) => monthCharge(each)),
    carriedIn: value.carriedIn && money(value.carriedIn),
    carriedOut: value.carriedOut && money(value.carriedOut),
    prepaidCredit: value.prepaidCredit && prepaidCredit(value.prepaidCredit),
    creditNotes: value.creditNotes.map((each) => creditNoteSummary(each)),
    taxNote: value.taxNote,
    reportFormat: value.reportFormat,
    receiptsRoot: value.receiptsRoot,
    billingProfile: value.billingProfile && billingProfile(value.billingProfile),
    rounding: value.rounding && money(value.rounding),
  };
}

export function endUserLimits(
  value: GetEndUserResponseMessage = create(GetEndUserResponseSchema),
): EndUserLimits {
  return {
    endUser: endUser(value.endUser),
    quotas: value.quotas.map((each) => quotaStatus(each)),
  };
}

export function month(
  value: MonthMessage = create(MonthSchema),
): Month {
  return {
    organizationName: value.organizationName,
    organizationId: value.organizationId,
    month: value.month,
    state: word<MonthState>(MonthStateMessage, value.state),
    closingTime: date(value.closingTime),
    closingBy: value.closingBy,
    closeTime: date(value.closeTime),
    closedBy: value.closedBy,
    invoiceNumber: value.invoiceNumber,
    total: value.total && money(value.total),
    jsonSha256: value.jsonSha256,
    csvSha256: value.csvSha256,
    reportFormat: value.reportFormat,
    receiptsRoot: value.receiptsRoot,
    payments: value.payments.map((each) => invoicePayment(each)),
    pdfSha256: value.pdfSha256,
  };
}

export function obstacle(
  value: ObstacleMessage = create(ObstacleSchema),
): Obstacle {
  return {
    kind: value.kind,
    description: value.description,
  };
}

export function closedMonth(
  value: CloseMonthResponseMessage = create(CloseMonthResponseSchema),
): ClosedMonth {
  return {
    month: month(value.month),
    obstacles: value.obstacles.map((each) => obstacle(each)),
    alreadyClosed: value.alreadyClosed,
  };
}

export function monthVerification(
  value: VerifyMonthResponseMessage = create(VerifyMonthResponseSchema),
): MonthVerification {
  return {
    month: month(value.month),
    jsonSha256: value.jsonSha256,
    csvSha256: value.csvSha256,
    reproduced: value.reproduced,
    differences: value.differences,
  };
}

export function adjustment(
  value: AdjustmentMessage = create(AdjustmentSchema),
): Adjustment {
  return {
    adjustmentId: value.adjustmentId,
    organizationId: value.organizationId,
    amount: money(value.amount),
    reason: value.reason,
    invoiceNumber: value.invoiceNumber,
    state: word<AdjustmentState>(AdjustmentStateMessage, value.state),
    author: value.author,
    createTime: date(value.createTime),
    decidedBy: value.decidedBy,
    decideTime: date(value.decideTime),
    billingMonth: value.billingMonth,
    creditNoteNumber: value.creditNoteNumber,
  };
}
