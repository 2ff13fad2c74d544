/**
 * Values returned by the inference client: output, usage, cost, limits.
 *
 * Plain data without gRPC. Counts are in tokens or requests, `Ms` is milliseconds. Money and quota
 * values are exact `bigint`s, which may exceed a `number`.
 */

import type { Money } from "./money.js";

/** Reason why an admitted request ended. */
export type FinishReason =
  | "UNSPECIFIED"
  | "STOP"
  | "STOP_SEQUENCE"
  | "LENGTH"
  | "CANCELLED"
  | "DEADLINE"
  | "QUOTA_EXHAUSTED"
  | "COST_LIMIT"
  | "SLOW_CONSUMER"
  | "FILTERED"
  | "TOOL_CALLS";

/** Reason why a request has no new output. */
export type Stage = "UNSPECIFIED" | "QUEUED" | "ENGINE_LOADING" | "RUNNING";

/** State of a recorded request. */
export type GenerationState = "UNSPECIFIED" | "RUNNING" | "SETTLED" | "VOIDED" | "EXPIRED";

/** Owner of a quota. */
export type QuotaSubject = "UNSPECIFIED" | "ORGANIZATION" | "PROJECT" | "API_KEY";

/** Names of what a quota measures, as everywhere. "unspecified": newer than this client. */
export const QUOTA_DIMENSIONS = [
  "unspecified",
  "concurrent-requests",
  "requests-per-minute",
  "tokens-per-minute",
  "input-tokens-per-minute",
  "output-tokens-per-minute",
  "tokens-per-day",
  "tokens-per-month",
  "cost-per-day",
  "cost-per-month",
  "prepaid-credit",
] as const;

/** Measure and window of a quota. */
export type QuotaDimension = (typeof QUOTA_DIMENSIONS)[number];

/** Token counts of one request. */
export interface Usage {
  readonly inputTokenCount: number;
  /** Part of `inputTokenCount`, served from the prefix cache. */
  readonly cachedInputTokenCount: number;
  /** Produced by the engine. */
  readonly generatedTokenCount: number;
  /** Handed to the transport. */
  readonly deliveredTokenCount: number;
  /** Output tokens on the bill: the delivered ones. */
  readonly billedTokenCount: number;
  /** Priced separately; an embedding request has no other tokens. */
  readonly embeddingTokenCount: number;
  /** Output tokens that were about to be sent; 0 while the request runs. */
  readonly journalledTokenCount: number;
  /** Part of the delivered tokens: the model's thinking. */
  readonly reasoningTokenCount: number;
}

/**
 * Milliseconds spent in each stage of a request. Stages sum to `totalMs`, except `clientStallMs`,
 * which overlaps `decodeMs` up to the last token.
 */
export interface Timings {
  readonly authMs: number;
  readonly tokenizeMs: number;
  readonly admissionMs: number;
  readonly queueMs: number;
  readonly coldStartMs: number;
  readonly prefillMs: number;
  readonly decodeMs: number;
  /** Tokens were ready, and the client did not take them. */
  readonly clientStallMs: number;
  readonly settleMs: number;
  /** From the start frame's arrival at the server to the first token. */
  readonly ttftMs: number;
  readonly totalMs: number;
  /** Median gap between consecutive messages with tokens, without waiting for the client. */
  readonly itlP50Ms: number;
  readonly itlP99Ms: number;
  readonly itlMaxMs: number;
  /** After the first token. */
  readonly tokensPerSecond: number;
}

/**
 * One limit with its remainder. Values are requests, tokens or picos of the currency, by dimension.
 */
export interface QuotaStatus {
  readonly quotaId: string;
  readonly subject: QuotaSubject;
  readonly subjectId: string;
  /** Empty: all models together. */
  readonly model: string;
  readonly dimension: QuotaDimension;
  readonly limitValue: bigint;
  readonly usedValue: bigint;
  /** Held by running requests. */
  readonly heldValue: bigint;
  readonly remainingValue: bigint;
  /** Absent for concurrency. */
  readonly resetTime: Date | undefined;
  readonly resetDelayMs: number | undefined;
  /** Display name. */
  readonly subjectName: string;
  /** False: shadow mode, counts without refusing. */
  readonly enforced: boolean;
  /** Admissions of this window that shadow mode would have refused. */
  readonly wouldRefuseCount: number;
  /** Thousandths that a token of a kind counts; 0 for limits that do not count tokens. */
  readonly inputWeightMilli: number;
  readonly cachedInputWeightMilli: number;
  readonly outputWeightMilli: number;
  /** Without the temporary override. */
  readonly baseLimitValue: bigint;
  /** End of the temporary override; undefined: none. */
  readonly overrideEndTime: Date | undefined;
  readonly overrideReason: string;
  /**
   * Has the smallest remainder of its dimension's limits. Set, as the next field, only in lists of
   * all limits of one key.
   */
  readonly binding: boolean;
  /** An inherited limit that always runs out first. */
  readonly narrowedByQuotaId: string;
  /** No limit itself, but a default copied to new keys. */
  readonly forNewKeys: boolean;
  /** Percent of the limit used; for prepaid credit, remaining picos. Empty with a generation. */
  readonly alertAt: readonly bigint[];
}

/** The request was admitted and its tokens are held. */
export interface Admitted {
  readonly type: "admitted";
  readonly inputTokenCount: number;
  readonly predictedCachedTokenCount: number;
  readonly quotas: readonly QuotaStatus[];
  readonly priceVersion: number;
  /** Of all choices; 0 from older servers. */
  readonly maxOutputTokenCount: number;
  /** Limited by the key, as the request gives no limit. */
  readonly limitedByKey: boolean;
}

/** The request is waiting, or RUNNING without output for some seconds. */
export interface Progress {
  readonly type: "progress";
  readonly stage: Stage;
  /** Number of requests ahead, only while QUEUED. */
  readonly queuePosition: number;
  /** Absent: unknown. */
  readonly estimatedWaitMs: number | undefined;
  /** Loaded fraction of the engine, 0 to 1, only while ENGINE_LOADING. */
  readonly loadingFraction: number;
  /** `memory`, `process`, `import`, `weights`, or a newer stage; empty if unknown. */
  readonly loadingStage: string;
}

/** A token and the natural logarithm of its probability. */
export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
}

/**
 * Log-probability of an output token in the model's own distribution, with the likeliest tokens.
 */
export interface TokenLogprobs {
  readonly chosen: TokenLogprob;
  /** The likeliest first. */
  readonly top: readonly TokenLogprob[];
}

/** One tool call made by the model. Arguments are unchecked unless it was required or strict. */
export interface ToolCall {
  /** For the message with the result. */
  readonly id: string;
  readonly name: string;
  /** The JSON text of an object. */
  readonly argumentsJson: string;
}

/** An increment of one call. */
export interface ToolCallDelta {
  /** Index among the calls of the choice, from 0. */
  readonly index: number;
  /** Sent with the first piece of a call only. */
  readonly id: string;
  /** Sent with the first piece of a call only. */
  readonly name: string;
  /** Next piece of the arguments. */
  readonly argumentsJson: string;
}

/** New output of a request. */
export interface Delta {
  readonly type: "delta";
  /** Increases by one, from 1. */
  readonly seq: number;
  /** Empty while a character is incomplete or may belong to a stop sequence. */
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** One per token, if `topLogprobs` was given. */
  readonly logprobs: readonly TokenLogprobs[];
  /** Choice of the output, if `choiceCount` is more than 1. */
  readonly choiceIndex: number;
  /** Increments of calls, if `tools` was given. */
  readonly toolCalls: readonly ToolCallDelta[];
  /** New thinking, which precedes the text. */
  readonly reasoning: string;
  /** Tokens now known to be thinking. */
  readonly reasoningTokenCount: number;
  /** Of one of several choices, which ends with this delta; otherwise undefined. */
  readonly finishReason: FinishReason | undefined;
}

/** Running counts, sent at the interval asked for with `usageIntervalTokens`. */
export interface UsageUpdate {
  readonly type: "usage";
  readonly usage: Usage;
  readonly cost: Money;
}

/** The request continues on another stream. No output is missing or repeated. */
export interface Resumed {
  readonly type: "resumed";
  /** The next delta has the number after this one. */
  readonly afterSeq: number;
  /** Last one generated so far. */
  readonly lastSeq: number;
  /** False: it has ended, and the rest of its output follows. */
  readonly running: boolean;
}

/** Limits of a running request. */
export interface Limits {
  /** Of each choice. */
  readonly maxOutputTokens: number;
  /** Undefined: limited by the quotas only. */
  readonly maxCost: Money | undefined;
}

/** Event of a running request. */
export type Event = Admitted | Progress | Delta | UsageUpdate | Resumed;

/** One of several outputs of a prompt. */
export interface Choice {
  readonly index: number;
  readonly finishReason: FinishReason;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly TokenLogprobs[];
  /** The model's calls, if `tools` was given. */
  readonly toolCalls: readonly ToolCall[];
  /** The model's thinking, apart from the text. */
  readonly reasoning: string;
  /** The stop sequence or stop token of yours that ended it. */
  readonly stoppedBy: string | number | undefined;
}

/**
 * A completed request, with the numbers on the bill.
 *
 * `choices` has every output in order; text, tokens and reason beside it are those of the first.
 * `usage` and `cost` cover all choices.
 */
export interface Result {
  readonly requestId: string;
  readonly model: string;
  readonly finishReason: FinishReason;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly TokenLogprobs[];
  /** The model's calls, if `tools` was given. */
  readonly toolCalls: readonly ToolCall[];
  /** The model's thinking, apart from the text. */
  readonly reasoning: string;
  /** The stop sequence or stop token of yours that ended it. */
  readonly stoppedBy: string | number | undefined;
  readonly choices: readonly Choice[];
  readonly usage: Usage;
  /** Before plan and tax. */
  readonly cost: Money;
  readonly timings: Timings;
  readonly admitted: Admitted | undefined;
  /** Exhausted quotas, for QUOTA_EXHAUSTED. */
  readonly exhaustedQuotas: readonly QuotaStatus[];
  /** Number of signed receipts: one, unless nothing was billed. */
  readonly receiptCount: number;
  /** Number of moves to another engine after the loss of one. */
  readonly migrationCount: number;
}

/** Received part of a request without a final frame. Text and tokens are the first choice's. */
export interface Partial {
  readonly requestId: string;
  readonly model: string;
  readonly text: string;
  readonly reasoning: string;
  readonly tokenIds: readonly number[];
  readonly usage: Usage | undefined;
  readonly cost: Money | undefined;
  readonly timings: Timings | undefined;
  readonly admitted: Admitted | undefined;
}

/** Vector of one text. */
export interface Embedding {
  readonly vector: readonly number[];
  /** Embedded tokens of the text. */
  readonly tokenCount: number;
  /** True if the end of the text was cut. */
  readonly truncated: boolean;
}

/** Vectors of one request, in the order of its texts, with usage and cost. */
export interface EmbedResult {
  readonly requestId: string;
  readonly model: string;
  readonly embeddings: readonly Embedding[];
  readonly usage: Usage;
  readonly cost: Money;
  readonly timings: Timings;
  readonly priceVersion: number;
  /** At its admission, this request included. */
  readonly quotas: readonly QuotaStatus[];
}

/** The server's record of one request. */
export interface Generation {
  readonly requestId: string;
  readonly state: GenerationState;
  readonly model: string;
  readonly admitTime: Date | undefined;
  /** Absent while it runs. */
  readonly settleTime: Date | undefined;
  readonly usage: Usage;
  /** Absent while it runs. */
  readonly cost: Money | undefined;
  /** Absent while it runs, and after a recovery. */
  readonly timings: Timings | undefined;
  /** A finish reason or FAILED; empty while it runs. */
  readonly outcome: string;
  /** Number of moves to another engine. */
  readonly migrationCount: number;
  readonly labels: Readonly<Record<string, string>>;
}
