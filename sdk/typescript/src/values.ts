/**
 * The values that a client hands out: what was generated, what it used, what it costs, what is left.
 *
 * Plain data without any gRPC in it. Counts are in tokens or requests, `Ms` is milliseconds. Money and quota values are `bigint`,
 * because they are exact and may be larger than a `number` holds.
 */

import type { Money } from "./money.js";

/** Why a request that ran came to its end. */
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

/** What a request waits for before its first token. */
export type Stage = "UNSPECIFIED" | "QUEUED" | "ENGINE_LOADING";

/** Where a recorded request stands. */
export type GenerationState = "UNSPECIFIED" | "RUNNING" | "SETTLED" | "VOIDED" | "EXPIRED";

/** What a quota hangs on. */
export type QuotaSubject = "UNSPECIFIED" | "ORGANIZATION" | "PROJECT" | "API_KEY";

/** What a quota counts, and over which time. UNSPECIFIED: something that is newer than this client. */
export type QuotaDimension =
  | "UNSPECIFIED"
  | "CONCURRENT_REQUESTS"
  | "REQUESTS_PER_MINUTE"
  | "TOKENS_PER_MINUTE"
  | "INPUT_TOKENS_PER_MINUTE"
  | "OUTPUT_TOKENS_PER_MINUTE"
  | "TOKENS_PER_DAY"
  | "TOKENS_PER_MONTH"
  | "COST_PER_DAY"
  | "COST_PER_MONTH"
  | "PREPAID_CREDIT";

/** Tokens of one request, counted where it matters for the bill. */
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
  /** Embedded, at their own price. A request that has some has no others. */
  readonly embeddingTokenCount: number;
}

/** Where the time of one request went, in milliseconds. The stages follow each other and sum up to `totalMs`. */
export interface Timings {
  readonly authMs: number;
  readonly tokenizeMs: number;
  readonly admissionMs: number;
  readonly queueMs: number;
  readonly coldStartMs: number;
  readonly prefillMs: number;
  readonly decodeMs: number;
  readonly clientStallMs: number;
  readonly settleMs: number;
  /** From the start frame's arrival at the server to the first token. */
  readonly ttftMs: number;
  readonly totalMs: number;
}

/** One limit and how much of it is left. Values are requests, tokens or picos of the currency, by dimension. */
export interface QuotaStatus {
  readonly quotaId: string;
  readonly subject: QuotaSubject;
  readonly subjectId: string;
  /** Empty: all models together. */
  readonly model: string;
  readonly dimension: QuotaDimension;
  readonly limitValue: bigint;
  readonly usedValue: bigint;
  /** Held by requests that run now. */
  readonly heldValue: bigint;
  readonly remainingValue: bigint;
  /** Absent for concurrency. */
  readonly resetTime: Date | undefined;
  readonly resetDelayMs: number | undefined;
  /** For people. */
  readonly subjectName: string;
  /** False: it counts and reports, and refuses nobody. */
  readonly enforced: boolean;
  /** Admissions in this window that it would have refused. */
  readonly wouldRefuseCount: number;
  /** Weights are thousandths that a token of a kind counts; 0 where no tokens are counted. */
  readonly inputWeightMilli: number;
  readonly cachedInputWeightMilli: number;
  readonly outputWeightMilli: number;
  /** Without a raise. */
  readonly standingLimitValue: bigint;
  /** Absent: not raised. */
  readonly raisedUntilTime: Date | undefined;
  readonly raiseReason: string;
  /** Of the limits on its dimension, it has least left. Told only with all the limits of one key, as the next. */
  readonly binding: boolean;
  /** A limit further up that always runs out first. */
  readonly narrowedByQuotaId: string;
  /** It limits nothing itself: new keys get a copy. */
  readonly forNewKeys: boolean;
  /** Percent of the limit that are used; of prepaid credit, picos that are left. Empty with a generation. */
  readonly alertAt: readonly bigint[];
}

/** The request was let in and its tokens are held. */
export interface Admitted {
  readonly type: "admitted";
  readonly inputTokenCount: number;
  readonly predictedCachedTokenCount: number;
  readonly quotas: readonly QuotaStatus[];
  readonly priceVersion: number;
  /** Of all choices; 0 from older servers, which do not tell. */
  readonly maxOutputTokenCount: number;
  /** That is what the key may have, since the request does not say how much it wants. */
  readonly boundedByKey: boolean;
}

/** The request waits. */
export interface Progress {
  readonly type: "progress";
  readonly stage: Stage;
  /** Requests ahead of it, only while QUEUED. */
  readonly queuePosition: number;
  /** Absent: unknown. */
  readonly estimatedWaitMs: number | undefined;
  /** How much of the engine is loaded, 0 to 1, only while ENGINE_LOADING. */
  readonly loadingFraction: number;
  /** `memory`, `process`, `import`, `weights`, or something newer; empty where there is nothing to tell. */
  readonly loadingStage: string;
}

/** A token and the natural logarithm of its probability. */
export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
}

/** How likely an output token was in the model's own distribution, and the likeliest ones at its place. */
export interface TokenLogprobs {
  readonly chosen: TokenLogprob;
  /** The likeliest first. */
  readonly top: readonly TokenLogprob[];
}

/** One call of a tool that the model has made. Where it was free to call, the arguments are what it wrote: read them with care. */
export interface ToolCall {
  /** For the message with the result. */
  readonly id: string;
  readonly name: string;
  /** The JSON text of an object. */
  readonly argumentsJson: string;
}

/** More of one call. */
export interface ToolCallDelta {
  /** Among the calls of the choice, from 0. */
  readonly index: number;
  /** With the first piece of a call, and empty later. */
  readonly id: string;
  /** With the first piece of a call, and empty later. */
  readonly name: string;
  /** More of the arguments. */
  readonly argumentsJson: string;
}

/** New output of a request. */
export interface Delta {
  readonly type: "delta";
  /** Grows by one, from 1. */
  readonly seq: number;
  /** Empty while a character is incomplete or may belong to a stop sequence. */
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** One per token, if `topLogprobs` was given. */
  readonly logprobs: readonly TokenLogprobs[];
  /** Whose output, if `choiceCount` is more than 1. */
  readonly choiceIndex: number;
  /** New of calls, if `tools` was given. */
  readonly toolCalls: readonly ToolCallDelta[];
}

/** Running counts, sent at the interval asked for with `usageIntervalTokens`. */
export interface UsageUpdate {
  readonly type: "usage";
  readonly usage: Usage;
  readonly cost: Money;
}

/** The request goes on, on another stream than it was started on. No output is missing, and none comes twice. */
export interface Resumed {
  readonly type: "resumed";
  /** The next delta has the number after this one. */
  readonly afterSeq: number;
  /** The last one that there was by then. */
  readonly lastSeq: number;
  /** False: it has ended, and the rest of its output follows. */
  readonly running: boolean;
}

/** The limits of a request that runs. */
export interface Limits {
  /** Of each choice. */
  readonly maxOutputTokens: number;
  /** Absent: none beside the quotas. */
  readonly maxCost: Money | undefined;
}

/** Whatever a running request says. */
export type Event = Admitted | Progress | Delta | UsageUpdate | Resumed;

/** One of several outputs of a prompt. */
export interface Choice {
  readonly index: number;
  readonly finishReason: FinishReason;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly TokenLogprobs[];
  /** What the model calls, if `tools` was given. */
  readonly toolCalls: readonly ToolCall[];
}

/**
 * A request that ran to its end, with the numbers that will be on the bill.
 *
 * `choices` has every output in order; text, tokens and reason beside it are the first one's. `usage` and `cost` are of all.
 */
export interface Result {
  readonly requestId: string;
  readonly model: string;
  readonly finishReason: FinishReason;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly TokenLogprobs[];
  /** What the model calls, if `tools` was given. */
  readonly toolCalls: readonly ToolCall[];
  readonly choices: readonly Choice[];
  readonly usage: Usage;
  /** Before plan and tax. */
  readonly cost: Money;
  readonly timings: Timings;
  readonly admitted: Admitted | undefined;
  /** Which quota ran out, for QUOTA_EXHAUSTED. */
  readonly exhaustedQuotas: readonly QuotaStatus[];
  /** How many signed receipts came with the end: one, unless nothing was to be billed. */
  readonly receiptCount: number;
  /** How often its output went on in another engine because the one that generated it was lost. */
  readonly migrationCount: number;
}

/** What is known of a request that has no proper end. Text and tokens are the first choice's. */
export interface Partial {
  readonly requestId: string;
  readonly model: string;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly usage: Usage | undefined;
  readonly cost: Money | undefined;
  readonly timings: Timings | undefined;
  readonly admitted: Admitted | undefined;
}

/** One text's vector. */
export interface Embedding {
  readonly vector: readonly number[];
  /** Tokens of the text that were embedded. */
  readonly tokenCount: number;
  /** Its end was left out. */
  readonly truncated: boolean;
}

/** The vectors of one request, in the order of its texts, and what they cost. */
export interface EmbedResult {
  readonly requestId: string;
  readonly model: string;
  readonly embeddings: readonly Embedding[];
  readonly usage: Usage;
  readonly cost: Money;
  readonly timings: Timings;
  readonly priceVersion: number;
  /** As of its admission, this request counted. */
  readonly quotas: readonly QuotaStatus[];
}

/** What the server has recorded of one request. */
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
  /** How often it went on in another engine because its own was lost. */
  readonly migrationCount: number;
  readonly labels: Readonly<Record<string, string>>;
}
