/**
 * Conversion of the frames of a stream to the client's events. `generated_wire.ts` has the messages
 * whose values have the same fields.
 */

import {
  type AdmittedFrame,
  type DeltaFrame,
  type EmbedResponse,
  type ProgressFrame,
  ProgressFrame_Stage,
  type UpdatedFrame,
} from "./gen/weir/v1/inference_service_pb.js";
import { count, durationMs, finishReason, money, name } from "./conversion.js";
import type { Stage } from "./generated_values.js";
import { quotaStatus, timings, tokenLogprobs, usage } from "./generated_wire.js";
import { type Money, PICOS_PER_UNIT } from "./money.js";
import type { Admitted, Delta, EmbedResult, Limits, Progress } from "./values.js";

export * from "./conversion.js";
export * from "./generated_wire.js";

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
    quotas: frame.quotas.map((each) => quotaStatus(each)),
    priceVersion: count(frame.priceVersion),
    maxOutputTokenCount: count(frame.maxOutputTokenCount),
    limitedByKey: frame.limitedByKey,
    model: frame.model,
    requestedModel: frame.requestedModel,
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
    logprobs: frame.logprobs.map((each) => tokenLogprobs(each)),
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
    timings: timings(response.timings),
    priceVersion: count(response.priceVersion),
    quotas: response.quotas.map((each) => quotaStatus(each)),
  };
}

/** Timings of a request whose server sent none. */
export const NO_TIMINGS = timings();
