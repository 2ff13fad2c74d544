/** Options of the calls of a client. */

import type { Money } from "./money.js";
import type { ToolCall } from "./values.js";

/** One message of a conversation. */
export interface Message {
  readonly role: "system" | "user" | "assistant" | "tool";
  readonly content: string;
  /** The model's calls (`Result.toolCalls`), in a message of the role `assistant`. */
  readonly toolCalls?: readonly ToolCall[];
  /** The call whose result a message of the role `tool` holds. */
  readonly toolCallId?: string;
  /** The model's thinking (`Result.reasoning`), in a message of the role `assistant`. */
  readonly reasoning?: string;
}

/** Function that the model may call. The caller runs it and sends its result back. */
export interface Tool {
  readonly name: string;
  readonly description?: string;
  /** JSON schema of an object, or its text; undefined: no parameters. */
  readonly parameters?: object | string;
  /** Arguments are always valid under it; only on engines with grammars. */
  readonly strict?: boolean;
}

/** A question, or the messages of a conversation. */
export type Prompt = string | readonly Message[];

/** Options of `generate` and `complete`. Defaults are the model's or the server's. */
export interface GenerateOptions {
  /**
   * Conversation, rendered with the model's chat template. Exactly one of `prompt`, `text` and
   * `tokenIds`.
   */
  readonly prompt?: Prompt;
  /** A prompt passed to the model without a chat template. */
  readonly text?: string;
  /** A prompt as ids of the model's tokenizer. */
  readonly tokenIds?: readonly number[];
  /** At least 1; default: until the model stops or its context window is full. */
  readonly maxOutputTokens?: number;
  /**
   * Limit of the cost, in the organization's currency; ends as COST_LIMIT before the token that
   * would exceed it.
   */
  readonly maxCost?: Money;
  /** 0 (greedy) to 2. */
  readonly temperature?: number;
  /** Above 0, at most 1. */
  readonly topP?: number;
  /** 0 keeps all. */
  readonly topK?: number;
  /** Makes sampling repeatable. A 64-bit integer. */
  readonly seed?: number | bigint;
  /** 0 to 1; drops tokens less likely than this fraction of the likeliest token's probability. */
  readonly minP?: number;
  /** Above 0, at most 2; above 1 makes tokens of prompt and output less likely. */
  readonly repetitionPenalty?: number;
  /** -2 to 2, subtracted for tokens of the output. */
  readonly presencePenalty?: number;
  /** -2 to 2, subtracted per occurrence in the output. */
  readonly frequencyPenalty?: number;
  /** Added to the logits of these token ids, -100 to 100 each. */
  readonly logitBias?: Readonly<Record<number, number>>;
  /** One string, or up to 16, that ends the output and is cut off. */
  readonly stop?: string | readonly string[];
  /** Ids that end the output, besides the model's own. */
  readonly stopTokenIds?: readonly number[];
  /** Number of tokens before the output may end by itself. */
  readonly minOutputTokens?: number;
  /** Whether the model thinks before it answers, if its chat template has a switch. */
  readonly thinking?: boolean;
  /** How much the model thinks, instead of `thinking`: `none` to `max`. */
  readonly reasoningEffort?: string;
  /**
   * The last message of `prompt`, of the role `assistant`, is the beginning of the answer; the
   * output follows its text.
   */
  readonly continuesLastMessage?: boolean;
  /** Limit of tokens of thinking, after which the answer follows. */
  readonly maxReasoningTokens?: number;
  /** Continue past the model's end of sequence; for benchmarks. */
  readonly ignoreEos?: boolean;
  /**
   * The answer is a JSON document valid under it: an object, or its text. At most one of
   * `jsonSchema`, `regex` and `lark`.
   */
  readonly jsonSchema?: object | string;
  /** The whole answer matches it. */
  readonly regex?: string;
  /** The answer follows this EBNF grammar in Lark's syntax. */
  readonly lark?: string;
  /**
   * Functions that the model may call, if its chat template supports tools; the calls are in
   * `Result.toolCalls`, and stream in `Delta.toolCalls`. Excludes the formats above and
   * `beamWidth`.
   */
  readonly tools?: readonly Tool[];
  /**
   * `auto` is the default; `required`: at least one call, valid under its schema, and no text;
   * `name`: this tool is called once.
   */
  readonly toolChoice?: "auto" | "none" | "required" | { readonly name: string };
  /** The output ends after its first call. */
  readonly singleToolCall?: boolean;
  /**
   * 1 to 16 answers to the prompt, in `Result.choices`; with a temperature of 0 all are equal,
   * unless `beamWidth` is set. All are billed.
   */
  readonly choiceCount?: number;
  /** 2 to 16 beams that search for the likeliest answers. */
  readonly beamWidth?: number;
  /** With `beamWidth`, -10 to 10, by default 1: above 0 favours long answers. */
  readonly lengthPenalty?: number;
  /** With `beamWidth`: when the search is over. */
  readonly earlyStopping?: boolean | "never";
  /** 0 to 20: returns the log-probability of each token and of so many likeliest tokens. */
  readonly topLogprobs?: number;
  /** Number of output tokens between two `UsageUpdate` events. */
  readonly usageIntervalTokens?: number;
  /** The caller's labels, stored with the usage event. */
  readonly labels?: Readonly<Record<string, string>>;
  /** Your own user for whom the request is made. Default: the client's. */
  readonly endUser?: string;
  /** A UUID, the idempotency key of the request; generated if absent. */
  readonly requestId?: string;
  /** `batch` runs when no interactive request waits for the model. */
  readonly tier?: "interactive" | "batch";
  /**
   * Region of the deployment to run in; another one only if the operator allows it. Default: the
   * server's.
   */
  readonly region?: string;
  /**
   * Forbids that the operator's fallback answers if the model cannot. `Result.model` is the one
   * that answered. Default: false.
   */
  readonly noFallback?: boolean;
  /** Trace context of the request, as in W3C's header; servers with tracing continue it. */
  readonly traceparent?: string;
  /** Vendor-specific trace data, as in W3C's header. */
  readonly tracestate?: string;
  /**
   * Longest wait in the queue; default `timeoutMs`. Refused at once if the expected wait is longer.
   */
  readonly startTimeoutMs?: number;
  /**
   * Milliseconds for the request, retries included; then it is cancelled and `DeadlineExceeded` is
   * thrown.
   */
  readonly timeoutMs?: number;
  /** Retries before the first token; default: the client's setting. */
  readonly maxRetries?: number;
  /**
   * Milliseconds for which the server continues the request after the connection breaks, and the
   * client tries to resume it; default 30,000, or `timeoutMs` if that is less. Output generated
   * meanwhile is billed even if no client resumes. 0: the request ends with its connection.
   */
  readonly keepOnDisconnectMs?: number;
  /**
   * Largest number of output tokens that the server sends ahead of the reader; unset: no limit. A
   * request whose output is not read for a minute (set by the operator) ends as SLOW_CONSUMER.
   */
  readonly prefetchTokens?: number;
  /** Cancels the request. */
  readonly signal?: AbortSignal;
}

/** Options of `embed`. */
export interface EmbedOptions {
  /** Cut texts that have more tokens than the model takes; otherwise they are refused. */
  readonly truncate?: boolean;
  /** The caller's labels, stored with the usage event. */
  readonly labels?: Readonly<Record<string, string>>;
  /** Your own user for whom the request is made. Default: the client's. */
  readonly endUser?: string;
  /** `batch` runs when no interactive request waits for the model. */
  readonly tier?: "interactive" | "batch";
  /** A UUID, the idempotency key of the request; generated if absent. */
  readonly requestId?: string;
  /** Milliseconds for the whole request, retries included. Default 30,000. */
  readonly timeoutMs?: number;
  /** Further attempts; default: the client's setting. */
  readonly maxRetries?: number;
  /** Cancels the call. */
  readonly signal?: AbortSignal;
}

/** Input of `countTokens`: one of `prompt` and `text`. */
export interface CountOptions {
  /** A question, or messages. */
  readonly prompt?: Prompt;
  /** Plain text. */
  readonly text?: string;
  /** Tools passed to the model with a `prompt`. */
  readonly tools?: readonly Tool[];
}

/** Options of `usage`: a month, or days of use. By default the current month until today. */
export interface OwnUsageOptions {
  /** `YYYY-MM` in UTC: the usage that the month's bill charges. */
  readonly month?: string;
  /** First day of use, `YYYY-MM-DD` in UTC. */
  readonly firstDay?: string;
  /** Last day of use, `YYYY-MM-DD` in UTC; at most 92 days in all. Default: today. */
  readonly lastDay?: string;
  /** What a row is for, in this order. Default: `["day", "model"]`. */
  readonly by?: readonly ("day" | "hour" | "model" | "end_user" | `label:${string}`)[];
  /** Only this model. */
  readonly model?: string;
  /** Only this end user, by name. */
  readonly endUser?: string;
  /** Only requests with all these labels. */
  readonly labels?: Readonly<Record<string, string>>;
  /** The sum of all keys of the project; not for a key that is limited to some models. */
  readonly project?: boolean;
}

/** Options of `update`. Omitted limits are unchanged. */
export interface LimitOptions {
  /** Below the present output the request ends, as LENGTH. */
  readonly maxOutputTokens?: number;
  /** Below the present cost the request ends, as COST_LIMIT. */
  readonly maxCost?: Money;
}

/** Options of `attach`. */
export interface AttachOptions {
  /** Number of the last delta already received; default 0: none. */
  readonly afterSeq?: number;
  /** Milliseconds in total; then the request is cancelled and `DeadlineExceeded` is thrown. */
  readonly timeoutMs?: number;
  /**
   * Milliseconds to look for another stream, or for the request's server if that does not answer.
   * Default 30,000.
   */
  readonly resumeMs?: number;
  /** As in `GenerateOptions`, for a request that was started with it. */
  readonly prefetchTokens?: number;
  /** Cancels the request. */
  readonly signal?: AbortSignal;
}
