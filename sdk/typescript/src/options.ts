/** What the calls of a client take. */

import type { Money } from "./money.js";
import type { ToolCall } from "./values.js";

/** One message of a conversation. */
export interface Message {
  readonly role: "system" | "user" | "assistant" | "tool";
  readonly content: string;
  /** What the model called in a message of the role `assistant`: `Result.toolCalls`. */
  readonly toolCalls?: readonly ToolCall[];
  /** Which call a message of the role `tool` is the result of. */
  readonly toolCallId?: string;
}

/** A function that the model may call. Your program makes the call, and sends its result with the next request. */
export interface Tool {
  readonly name: string;
  readonly description?: string;
  /** The JSON schema of an object, or its text; without one it takes nothing. */
  readonly parameters?: object | string;
  /** Arguments are valid under it also where the model is free to call; only on engines that keep grammars. */
  readonly strict?: boolean;
}

/** A question, or the messages so far. */
export type Prompt = string | readonly Message[];

/** The options of `generate` and `complete`. What is left out is the model's or the server's default. */
export interface GenerateOptions {
  /** What the model continues, rendered with its chat template. Exactly one of `prompt`, `text` and `tokenIds`. */
  readonly prompt?: Prompt;
  /** A prompt given to the model as it is, without chat template. */
  readonly text?: string;
  /** A prompt as ids of the model's tokenizer. */
  readonly tokenIds?: readonly number[];
  /** At least 1; without it, until the model stops or its context window ends. */
  readonly maxOutputTokens?: number;
  /** The most that the request may cost, in the organization's currency; it ends as COST_LIMIT before a token beyond it. */
  readonly maxCost?: Money;
  /** 0 (greedy) to 2. */
  readonly temperature?: number;
  /** Above 0, at most 1. */
  readonly topP?: number;
  /** 0 keeps all. */
  readonly topK?: number;
  /** Makes sampling repeatable. A 64-bit integer. */
  readonly seed?: number | bigint;
  /** Keeps tokens at least so many times as likely as the likeliest, 0 to 1. */
  readonly minP?: number;
  /** Above 0, at most 2; above 1 makes tokens of prompt and output less likely. */
  readonly repetitionPenalty?: number;
  /** -2 to 2, subtracted for tokens of the output. */
  readonly presencePenalty?: number;
  /** -2 to 2, subtracted per occurrence in the output. */
  readonly frequencyPenalty?: number;
  /** Added to the logits of these token ids, -100 to 100 each. */
  readonly logitBias?: Readonly<Record<number, number>>;
  /** A text, or up to 16, that ends the output and is cut off. */
  readonly stop?: string | readonly string[];
  /** Ids that end the output, beside the model's own. */
  readonly stopTokenIds?: readonly number[];
  /** So many come before the output may end by itself. */
  readonly minOutputTokens?: number;
  /** Goes on where the model would stop by itself; for benchmarks. */
  readonly ignoreEos?: boolean;
  /** The answer is a JSON document valid under it: an object, or its text. At most one of `jsonSchema`, `regex` and `lark`. */
  readonly jsonSchema?: object | string;
  /** The whole answer matches it. */
  readonly regex?: string;
  /** The answer follows this EBNF grammar in Lark's syntax. */
  readonly lark?: string;
  /**
   * Functions that the model may call, if its chat template has a place for them: the calls are in `Result.toolCalls`, and come as they
   * grow in `Delta.toolCalls`. Excludes the formats above and `beamWidth`.
   */
  readonly tools?: readonly Tool[];
  /**
   * `auto` is the default; `required`: at least one call, valid under its schema, and no text; the name of a tool in `name`: that one is
   * called once.
   */
  readonly toolChoice?: "auto" | "none" | "required" | { readonly name: string };
  /** The output ends with its first call. */
  readonly singleToolCall?: boolean;
  /** 1 to 16 answers to the one prompt, in `Result.choices`; needs a temperature above 0, or `beamWidth`. */
  readonly choiceCount?: number;
  /** 2 to 16 beams that search for the likeliest answers. */
  readonly beamWidth?: number;
  /** With `beamWidth`, -10 to 10, by default 1: above 0 favours long answers. */
  readonly lengthPenalty?: number;
  /** With `beamWidth`: when the search is over. */
  readonly earlyStopping?: boolean | "never";
  /** 0 to 20: each token's log-probability and those of so many likeliest ones. */
  readonly topLogprobs?: number;
  /** Asks for a running `UsageUpdate` each so many output tokens. */
  readonly usageIntervalTokens?: number;
  /** Own labels, stored with the usage event. */
  readonly labels?: Readonly<Record<string, string>>;
  /** A UUID that names this request for good (idempotency key); minted if absent. */
  readonly requestId?: string;
  /** `batch` runs when nothing interactive waits for the same model. */
  readonly tier?: "interactive" | "batch";
  /** Where to run, one of the deployment's regions; elsewhere only as the operator lets it. Unset: where the server is. */
  readonly region?: string;
  /** The trace that the request belongs to, as in W3C's header; servers that trace go on with it. */
  readonly traceparent?: string;
  /** What else the systems of that trace hand on. */
  readonly tracestate?: string;
  /** How long the request may wait for its turn; `timeoutMs` if absent. Refused at once if it would wait longer. */
  readonly startTimeoutMs?: number;
  /** For the whole request, retries included; then it is cancelled and `DeadlineExceeded` is thrown. */
  readonly timeoutMs?: number;
  /** How often to try again before the first token; the client's setting if absent. */
  readonly maxRetries?: number;
  /**
   * For how long the server goes on with the request when the connection breaks, and the client looks for another one; 30,000, or
   * `timeoutMs` if that is less. What is generated meanwhile is billed, also if nobody comes back. 0: the request ends with its
   * connection.
   */
  readonly keepOnDisconnectMs?: number;
  /**
   * The server sends no further ahead of what is read than so many output tokens; unset, as fast as it generates. One who reads nothing
   * for a minute (as the operator says) while output is generated ends as SLOW_CONSUMER.
   */
  readonly prefetchTokens?: number;
  /** Cancels the request. */
  readonly signal?: AbortSignal;
}

/** The options of `embed`. */
export interface EmbedOptions {
  /** Leaves out the end of a text that has more tokens than the model takes; else such a text is refused. */
  readonly truncate?: boolean;
  /** Own labels, stored with the usage event. */
  readonly labels?: Readonly<Record<string, string>>;
  /** `batch` runs when nothing interactive waits for the same model. */
  readonly tier?: "interactive" | "batch";
  /** A UUID that names this request for good (idempotency key); minted if absent. */
  readonly requestId?: string;
  /** For the whole request, retries included. Default 30,000. */
  readonly timeoutMs?: number;
  /** Cancels the call. */
  readonly signal?: AbortSignal;
}

/** What `countTokens` counts: one of `prompt` and `text`. */
export interface CountOptions {
  /** A question, or messages. */
  readonly prompt?: Prompt;
  /** Plain text. */
  readonly text?: string;
  /** Tools that the model is shown with a `prompt`. */
  readonly tools?: readonly Tool[];
}

/** The options of `update`. What is left out stays as it is. */
export interface LimitOptions {
  /** Below what there is already the request ends, as LENGTH. */
  readonly maxOutputTokens?: number;
  /** Less than it has cost already: the request ends, as COST_LIMIT. */
  readonly maxCost?: Money;
}

/** The options of `attach`. */
export interface AttachOptions {
  /** The number of the last delta that is known already; 0, the default: everything. */
  readonly afterSeq?: number;
  /** For all of it; then the request is cancelled and `DeadlineExceeded` is thrown. */
  readonly timeoutMs?: number;
  /** How long to look for another stream when one breaks, or for the request's server if that does not answer. Default 30,000. */
  readonly resumeMs?: number;
  /** As in `GenerateOptions`, for a request that was started with it. */
  readonly prefetchTokens?: number;
  /** Cancels the request. */
  readonly signal?: AbortSignal;
}
