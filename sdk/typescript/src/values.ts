/**
 * Values of the client that no single message has: events, results and parts of them.
 *
 * Plain data without gRPC. Counts are in tokens or requests, `Ms` is milliseconds. Money and quota
 * values are exact `bigint`s, which may exceed a `number`.
 */

import type {
  FinishReason,
  QuotaStatus,
  Stage,
  Timings,
  TokenLogprobs,
  Usage,
} from "./generated_values.js";
import type { Money } from "./money.js";

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
  /** The model that has taken the request; empty from older servers. */
  readonly model: string;
  /** The model that was asked for, if `model` is its fallback; else empty. */
  readonly requestedModel: string;
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
  /** The model that was asked for, if its fallback `model` answered; else empty. */
  readonly requestedModel: string;
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

/** The size of a prompt. */
export interface TokenCount {
  readonly inputTokenCount: number;
  readonly contextWindowTokens: number;
}
