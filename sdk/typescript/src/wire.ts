/**
 * Conversion of wire messages to the client's values: the only reader of proto fields of responses.
 */

import { type Duration, type Timestamp, timestampMs } from "@bufbuild/protobuf/wkt";
import {
  type AdmittedFrame,
  type DeltaFrame,
  type EmbedResponse,
  type Generation as GenerationMessage,
  Generation_State,
  type KeyRestrictions as KeyRestrictionsMessage,
  type Model as ModelMessage,
  ModelTask as ModelTaskMessage,
  type Price as PriceMessage,
  type ProgressFrame,
  ProgressFrame_Stage,
  type QuoteResponse,
  ServiceTier,
  type UpdatedFrame,
} from "./gen/weir/v1/inference_service_pb.js";
import {
  FinishReason as FinishReasonMessage,
  type Money as MoneyMessage,
  QuotaDimension as QuotaDimensionMessage,
  type QuotaStatus as QuotaMessage,
  QuotaSubject as QuotaSubjectMessage,
  type Timings as TimingsMessage,
  type Usage as UsageMessage,
} from "./gen/weir/v1/types_pb.js";
import type { KeyRestrictions, Model, ModelTask, Price, Quote } from "./models.js";
import { jsonable, Money, PICOS_PER_UNIT } from "./money.js";
import type {
  Admitted,
  Delta,
  EmbedResult,
  FinishReason,
  Generation,
  GenerationState,
  Limits,
  Progress,
  QuotaDimension,
  QuotaStatus,
  QuotaSubject,
  Stage,
  Timings,
  TokenLogprobs,
  Usage,
} from "./values.js";
import { QUOTA_DIMENSIONS } from "./values.js";

/** Returns a count as a plain number. Throws a RangeError if it is not exact. */
export function count(value: bigint): number {
  const number = Number(value);
  if (!Number.isSafeInteger(number))
    throw new RangeError(`${value} is more than a number can hold exactly`);
  return number;
}

/** Returns a duration in milliseconds. */
export function durationMs(value: Duration | undefined): number | undefined {
  return value === undefined ? undefined : count(value.seconds) * 1000 + value.nanos / 1e6;
}

function date(value: Timestamp | undefined): Date | undefined {
  return value === undefined ? undefined : new Date(timestampMs(value));
}

// Names unknown to this version of the client become UNSPECIFIED.
function name<Name extends string>(names: Record<number, string>, value: number): Name {
  return (names[value] ?? "UNSPECIFIED") as Name;
}

/** Returns a dimension by its name; "unspecified" for one that is newer than this client. */
export function dimensionNamed(text: string): QuotaDimension {
  return QUOTA_DIMENSIONS.find((each) => each === text) ?? "unspecified";
}

function dimension(value: QuotaDimensionMessage): QuotaDimension {
  const spelling = name<string>(QuotaDimensionMessage, value).replace("_PICOS", "");
  return dimensionNamed(spelling.replaceAll("_", "-").toLowerCase());
}

export function finishReason(value: FinishReasonMessage): FinishReason {
  return name<FinishReason>(FinishReasonMessage, value);
}

export function money(value: MoneyMessage | undefined): Money {
  return value === undefined
    ? new Money("", 0n)
    : new Money(value.currencyCode, value.units * PICOS_PER_UNIT + value.picos);
}

export function usage(value: UsageMessage | undefined): Usage {
  return {
    inputTokenCount: count(value?.inputTokenCount ?? 0n),
    cachedInputTokenCount: count(value?.cachedInputTokenCount ?? 0n),
    generatedTokenCount: count(value?.generatedTokenCount ?? 0n),
    deliveredTokenCount: count(value?.deliveredTokenCount ?? 0n),
    billedTokenCount: count(value?.billedTokenCount ?? 0n),
    embeddingTokenCount: count(value?.embeddingTokenCount ?? 0n),
    journalledTokenCount: count(value?.journalledTokenCount ?? 0n),
    reasoningTokenCount: count(value?.reasoningTokenCount ?? 0n),
  };
}

export function timings(value: TimingsMessage): Timings {
  const {
    authMs,
    tokenizeMs,
    admissionMs,
    queueMs,
    coldStartMs,
    prefillMs,
    decodeMs,
    clientStallMs,
    settleMs,
    ttftMs,
    totalMs,
    itlP50Ms,
    itlP99Ms,
    itlMaxMs,
    tokensPerSecond,
  } = value;
  return {
    authMs,
    tokenizeMs,
    admissionMs,
    queueMs,
    coldStartMs,
    prefillMs,
    decodeMs,
    clientStallMs,
    settleMs,
    ttftMs,
    totalMs,
    itlP50Ms,
    itlP99Ms,
    itlMaxMs,
    tokensPerSecond,
  };
}

/** Returns the permissions of a key. */
export function restrictions(value: KeyRestrictionsMessage | undefined): KeyRestrictions {
  return {
    prefix: value?.prefix ?? "",
    scopes: value?.scopes ?? [],
    models: value?.models ?? [],
    maxInputTokens: count(value?.maxInputTokens ?? 0n) || undefined,
    maxOutputTokens: count(value?.maxOutputTokens ?? 0n) || undefined,
    allowedNetworks: value?.allowedNetworks ?? [],
    strictParameters: value?.strictParameters ?? false,
    secretExpireTime: date(value?.secretExpireTime),
    latestChange: value?.latestChange && {
      act: value.latestChange.act,
      actor: value.latestChange.actor,
      changeTime: date(value.latestChange.changeTime),
    },
  };
}

export function quota(value: QuotaMessage): QuotaStatus {
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

/** Returns the message of an amount. */
export function moneyInit(value: Money): { currencyCode: string; units: bigint; picos: bigint } {
  return {
    currencyCode: value.currencyCode,
    units: value.picos / PICOS_PER_UNIT,
    picos: value.picos % PICOS_PER_UNIT,
  };
}

export function limits(frame: UpdatedFrame): Limits {
  return {
    maxOutputTokens: count(frame.maxOutputTokens),
    maxCost: frame.maxCost && money(frame.maxCost),
  };
}

export function admitted(frame: AdmittedFrame): Admitted {
  return {
    type: "admitted",
    inputTokenCount: count(frame.inputTokenCount),
    predictedCachedTokenCount: count(frame.predictedCachedTokenCount),
    quotas: frame.quotas.map(quota),
    priceVersion: count(frame.priceVersion),
    maxOutputTokenCount: count(frame.maxOutputTokenCount),
    limitedByKey: frame.limitedByKey,
  };
}

export function progress(frame: ProgressFrame): Progress {
  return {
    type: "progress",
    stage: name<Stage>(ProgressFrame_Stage, frame.stage),
    queuePosition: count(frame.queuePosition),
    estimatedWaitMs: durationMs(frame.estimatedWait),
    loadingFraction: frame.loadingFraction,
    loadingStage: frame.loadingStage,
  };
}

export function delta(frame: DeltaFrame): Delta {
  return {
    type: "delta",
    seq: count(frame.seq),
    text: frame.text,
    tokenIds: frame.tokenIds,
    logprobs: frame.logprobs.map((each): TokenLogprobs => ({
      chosen: { tokenId: each.chosen?.tokenId ?? 0, logprob: each.chosen?.logprob ?? 0 },
      top: each.top.map(({ tokenId, logprob }) => ({ tokenId, logprob })),
    })),
    choiceIndex: frame.choiceIndex,
    reasoning: frame.reasoning,
    reasoningTokenCount: count(frame.reasoningTokenCount),
    finishReason: frame.end === undefined ? undefined : finishReason(frame.end.reason),
    toolCalls: frame.toolCalls.map(({ index, id, name, argumentsJson }) => ({
      index,
      id,
      name,
      argumentsJson,
    })),
  };
}

function price(value: PriceMessage): Price {
  return jsonable({
    version: count(value.version),
    currencyCode: value.currencyCode,
    inputPicosPerToken: value.inputPicosPerToken,
    cachedInputPicosPerToken: value.cachedInputPicosPerToken,
    outputPicosPerToken: value.outputPicosPerToken,
    embeddingPicosPerToken: value.embeddingPicosPerToken,
    reasoningPicosPerToken: value.reasoningPicosPerToken,
    effectiveTime: date(value.effectiveTime),
    tier: value.tier === ServiceTier.BATCH ? "batch" : "interactive",
    own: value.own,
  });
}

export function embedResult(
  requestId: string,
  modelName: string,
  response: EmbedResponse,
): EmbedResult {
  return {
    requestId,
    model: modelName,
    embeddings: response.embeddings.map(({ vector, tokenCount, truncated }) => ({
      vector,
      tokenCount: count(tokenCount),
      truncated,
    })),
    usage: usage(response.usage),
    cost: money(response.cost),
    timings: response.timings ? timings(response.timings) : NO_TIMINGS,
    priceVersion: count(response.priceVersion),
    quotas: response.quotas.map(quota),
  };
}

export function model(value: ModelMessage): Model {
  return {
    name: value.name,
    architecture: value.architecture,
    contextWindowTokens: count(value.contextWindowTokens),
    vocabularySize: count(value.vocabularySize),
    engine: value.engine,
    price: value.price && price(value.price),
    tierPrices: value.tierPrices.map(price),
    task: name<ModelTask>(ModelTaskMessage, value.task),
    embeddingDimension: count(value.embeddingDimension),
    embeddingInputCountMax: count(value.embeddingInputCountMax),
    aliases: value.aliases,
    versions: value.versions.map(({ version, share }) => ({ version, share })),
    readyReplicaCount: value.readyReplicaCount,
    replicaCount: value.replicaCount,
    drainedReplicaCount: value.drainedReplicaCount,
    kernels: value.kernels,
    refusedFields: value.refusedFields.map(({ field, values }) => ({ field, values })),
    countsFromUsage: value.countsFromUsage,
  };
}

export function quote(value: QuoteResponse): Quote {
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
    failingQuotas: value.failingQuotas.map(quota),
    quotas: value.quotas.map(quota),
  };
}

export function generation(value: GenerationMessage): Generation {
  return {
    requestId: value.requestId,
    state: name<GenerationState>(Generation_State, value.state),
    model: value.model,
    admitTime: date(value.admitTime),
    settleTime: date(value.settleTime),
    usage: usage(value.usage),
    cost: value.cost && money(value.cost),
    timings: value.timings && timings(value.timings),
    outcome: value.outcome,
    migrationCount: value.migrationCount,
    labels: value.labels,
  };
}

/** Timings of a request whose server sent none. */
export const NO_TIMINGS: Timings = {
  authMs: 0,
  tokenizeMs: 0,
  admissionMs: 0,
  queueMs: 0,
  coldStartMs: 0,
  prefillMs: 0,
  decodeMs: 0,
  clientStallMs: 0,
  settleMs: 0,
  ttftMs: 0,
  totalMs: 0,
  itlP50Ms: 0,
  itlP99Ms: 0,
  itlMaxMs: 0,
  tokensPerSecond: 0,
};
