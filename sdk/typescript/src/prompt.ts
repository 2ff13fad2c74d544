/**
 * From the options of `generate` to a start frame. Refuses locally only what cannot be written into the frame at all; whether the
 * values are allowed is the server's to say, so that there is one rule and not two.
 */

import { randomUUID } from "node:crypto";
import { create, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { InvalidRequest, NO_DETAILS } from "./errors.js";
import {
  type ClientFrame,
  ClientFrameSchema,
  ConversationSchema,
  EarlyStopping,
  type EmbedRequestSchema,
  Role,
  ServiceTier,
  type StartFrameSchema,
  Truncation,
  type UpdateFrameSchema,
} from "./gen/weir/v1/inference_service_pb.js";
import type { Money } from "./values.js";
import { moneyInit } from "./wire.js";

/** One message of a conversation. */
export interface Message {
  readonly role: "system" | "user" | "assistant";
  readonly content: string;
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

const ROLES: Readonly<Record<string, Role>> = { system: Role.SYSTEM, user: Role.USER, assistant: Role.ASSISTANT };

/** An `InvalidRequest` that names one field. */
export function invalid(field: string, description: string): InvalidRequest {
  const details = { ...NO_DETAILS, reason: "FIELD_INVALID", fieldViolations: [{ field, description }] };
  return new InvalidRequest(`${field}: ${description}`, { details });
}

/**
 * The start frame of a request.
 *
 * @throws InvalidRequest if not exactly one of prompt, text and tokenIds is given, or a value does not fit its field.
 */
export function buildStart(model: string, options: GenerateOptions): ClientFrame {
  const frame = create(ClientFrameSchema, {
    requestId: options.requestId ?? randomUUID(),
    kind: { case: "start", value: startInit(model, options) },
  });
  try {
    toBinary(ClientFrameSchema, frame); // a value that its field cannot hold is found here, and not on the shared stream
  } catch (error) {
    throw invalid("start", error instanceof Error ? error.message : String(error));
  }
  return frame;
}

function startInit(model: string, options: GenerateOptions): MessageInitShape<typeof StartFrameSchema> {
  const { stop = [], logitBias, labels } = options;
  const startTimeout = startTimeoutMs(options);
  return {
    model,
    prompt: promptInit(options),
    sampling: dropUndefined({
      temperature: options.temperature,
      topP: options.topP,
      topK: options.topK,
      seed: int64("seed", options.seed),
      minP: options.minP,
      repetitionPenalty: options.repetitionPenalty,
      presencePenalty: options.presencePenalty,
      frequencyPenalty: options.frequencyPenalty,
      logitBias: logitBias === undefined ? undefined : { ...logitBias },
    }),
    stopSequences: typeof stop === "string" ? [stop] : [...stop],
    stopTokenIds: [...(options.stopTokenIds ?? [])],
    minOutputTokens: int64("minOutputTokens", options.minOutputTokens) ?? 0n,
    ignoreEos: options.ignoreEos ?? false,
    labels: { ...labels },
    tier: options.tier === "batch" ? ServiceTier.BATCH : ServiceTier.INTERACTIVE,
    ...dropUndefined({
      maxOutputTokens: int64("maxOutputTokens", options.maxOutputTokens),
      maxCost: options.maxCost && moneyInit(options.maxCost),
      usageIntervalTokens: int64("usageIntervalTokens", options.usageIntervalTokens),
      initialCreditTokens: int64("prefetchTokens", checkPrefetch(options.prefetchTokens)),
      topLogprobs: options.topLogprobs,
      choiceCount: options.choiceCount,
      responseFormat: responseFormat(options),
      beamSearch: beamSearch(options),
      startTimeout: startTimeout === undefined ? undefined : durationFromMs(startTimeout),
    }),
  };
}

/**
 * A conversation from a question, or from messages.
 *
 * @throws InvalidRequest for a message without role or content, or with a role that does not exist.
 */
export function conversation(prompt: Prompt): MessageInitShape<typeof ConversationSchema> {
  const messages: readonly Message[] = typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
  return {
    messages: messages.map((message, index) => {
      const role = ROLES[message.role];
      if (role === undefined) throw invalid(`messages[${index}].role`, `'${message.role}' is not one of ${Object.keys(ROLES).join(", ")}`);
      if (typeof message.content !== "string") throw invalid(`messages[${index}].content`, "must be a text");
      return { role, content: message.content };
    }),
  };
}

function promptInit(options: GenerateOptions): NonNullable<MessageInitShape<typeof StartFrameSchema>["prompt"]> {
  const { prompt, text, tokenIds } = options;
  if ([prompt, text, tokenIds].filter((given) => given !== undefined).length !== 1) {
    throw invalid("prompt", "give exactly one of: prompt, text, tokenIds");
  }
  if (prompt !== undefined) return { case: "conversation", value: conversation(prompt) };
  if (text !== undefined) return { case: "text", value: text };
  return { case: "tokenIds", value: { ids: [...(tokenIds ?? [])] } };
}

function responseFormat(options: GenerateOptions): MessageInitShape<typeof StartFrameSchema>["responseFormat"] {
  const { jsonSchema, regex, lark } = options;
  if ([jsonSchema, regex, lark].filter((given) => given !== undefined).length > 1) {
    throw invalid("responseFormat", "give at most one of: jsonSchema, regex, lark");
  }
  if (jsonSchema !== undefined) {
    return { kind: { case: "jsonSchema", value: typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema) } };
  }
  if (regex !== undefined) return { kind: { case: "regex", value: regex } };
  return lark === undefined ? undefined : { kind: { case: "lark", value: lark } };
}

function beamSearch(options: GenerateOptions): MessageInitShape<typeof StartFrameSchema>["beamSearch"] {
  const { beamWidth, lengthPenalty, earlyStopping } = options;
  if (beamWidth === undefined) {
    if (lengthPenalty !== undefined) throw invalid("lengthPenalty", "has a meaning only with beamWidth");
    if (earlyStopping !== undefined) throw invalid("earlyStopping", "has a meaning only with beamWidth");
    return undefined;
  }
  const stopping =
    earlyStopping === "never" ? EarlyStopping.NEVER : earlyStopping ? EarlyStopping.WHEN_FULL : EarlyStopping.HEURISTIC;
  return { width: beamWidth, earlyStopping: stopping, ...dropUndefined({ lengthPenalty }) };
}

function startTimeoutMs(options: GenerateOptions): number | undefined {
  const milliseconds = options.startTimeoutMs ?? options.timeoutMs;
  // What the caller's own clock ends at once needs no word to the server.
  return milliseconds !== undefined && milliseconds > 0 && Number.isFinite(milliseconds) ? Math.max(1, milliseconds) : undefined;
}

/** One text, or several, each a text or its token ids, as a request for vectors. */
export function buildEmbed(
  model: string,
  inputs: string | readonly (string | readonly number[])[],
  options: EmbedOptions,
): MessageInitShape<typeof EmbedRequestSchema> & { requestId: string } {
  const texts = typeof inputs === "string" ? [inputs] : inputs;
  return {
    requestId: options.requestId ?? randomUUID(),
    model,
    inputs: texts.map((each) => ({
      kind: typeof each === "string" ? { case: "text", value: each } : { case: "tokenIds", value: { ids: [...each] } },
    })),
    truncation: options.truncate ? Truncation.END : Truncation.NONE,
    labels: { ...options.labels },
    tier: options.tier === "batch" ? ServiceTier.BATCH : ServiceTier.INTERACTIVE,
  };
}

/** Asks for other limits; what is left out stays as it is. */
export function buildUpdate(limits: LimitOptions): MessageInitShape<typeof UpdateFrameSchema> {
  const { maxOutputTokens, maxCost } = limits;
  return dropUndefined({ maxOutputTokens: int64("maxOutputTokens", maxOutputTokens), maxCost: maxCost && moneyInit(maxCost) });
}

/** As it is. Throws InvalidRequest for less than a token. */
export function checkPrefetch(tokenCount: number | undefined): number | undefined {
  if (tokenCount !== undefined && !(tokenCount >= 1)) {
    throw invalid("prefetchTokens", `must be at least 1, or absent for no limit, not ${tokenCount}`);
  }
  return tokenCount;
}

function int64(field: string, value: number | bigint | undefined): bigint | undefined {
  if (value === undefined || typeof value === "bigint") return value;
  if (!Number.isSafeInteger(value)) throw invalid(field, `${value} is not a whole number that can be sent exactly`);
  return BigInt(value);
}

type Defined<T> = { [Key in keyof T]?: Exclude<T[Key], undefined> };

/** Without the keys that are undefined: a field that is set is sent. */
function dropUndefined<T extends object>(value: T): Defined<T> {
  return Object.fromEntries(Object.entries(value).filter(([, each]) => each !== undefined)) as Defined<T>;
}
