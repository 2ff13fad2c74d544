/**
 * Conversion of messages to values.
 *
 * Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
 */

import { create } from "@bufbuild/protobuf";
import { count, date, dimension, durationMs, money, name } from "./conversion.js";
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
  QuotaStatusSchema,
  QuotaSubject as QuotaSubjectMessage,
  TimingsSchema,
  UsageSchema,
  type QuotaStatus as QuotaStatusMessage,
  type Timings as TimingsMessage,
  type Usage as UsageMessage,
} from "./gen/weir/v1/types_pb.js";
import {
  GetOwnUsageResponseSchema,
  UsageRowSchema,
  UsageShareSchema,
  type GetOwnUsageResponse as GetOwnUsageResponseMessage,
  type UsageRow as UsageRowMessage,
  type UsageShare as UsageShareMessage,
} from "./gen/weir/v1/usage_reports_pb.js";
import {
  type Generation,
  type GenerationState,
  type KeyChange,
  type KeyRestrictions,
  type Model,
  type ModelTask,
  type ModelVersion,
  type Price,
  type QuotaStatus,
  type QuotaSubject,
  type Quote,
  type RefusedField,
  type Timings,
  type TokenLogprob,
  type TokenLogprobs,
  type Usage,
  type UsageReport,
  type UsageRow,
  type UsageShare,
} from "./generated_values.js";
import { jsonable } from "./money.js";

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

export function quotaStatus(
  value: QuotaStatusMessage = create(QuotaStatusSchema),
): QuotaStatus {
  return jsonable({
    quotaId: value.quotaId,
    subject: name<QuotaSubject>(QuotaSubjectMessage, value.subject),
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
  });
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
