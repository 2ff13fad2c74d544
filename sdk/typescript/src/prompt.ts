/**
 * Conversion of the options of `generate` to a start frame. Refuses only values that the frame
 * cannot hold; the server checks all other rules, so that each rule exists once.
 */

import { randomUUID } from "node:crypto";
import { create, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { checkOptions, COUNT, EMBED, GENERATE, invalid, LIMITS } from "./checks.js";
import {
  type ClientFrame,
  ClientFrameSchema,
  ConversationSchema,
  type CountTokensRequestSchema,
  EarlyStopping,
  type EmbedRequestSchema,
  Role,
  ServiceTier,
  type StartFrameSchema,
  ToolMode,
  type ToolSchema,
  Truncation,
  type UpdateFrameSchema,
} from "./gen/weir/v1/inference_service_pb.js";
import type {
  CountOptions,
  EmbedOptions,
  GenerateOptions,
  LimitOptions,
  Message,
  Prompt,
  Tool,
} from "./options.js";
import { moneyInit } from "./wire.js";

const ROLES: Readonly<Record<string, Role>> = {
  system: Role.SYSTEM,
  user: Role.USER,
  assistant: Role.ASSISTANT,
  tool: Role.TOOL,
};
const TOOL_MODES: Readonly<Record<string, ToolMode>> = {
  auto: ToolMode.AUTO,
  none: ToolMode.NONE,
  required: ToolMode.REQUIRED,
};

/**
 * Builds the start frame of a request.
 *
 * @throws InvalidRequest if not exactly one of prompt, text and tokenIds is given, or a value does
 * not fit its field.
 */
export function buildStart(model: string, options: GenerateOptions): ClientFrame {
  checkOptions(options, GENERATE);
  const frame = create(ClientFrameSchema, {
    requestId: options.requestId ?? randomUUID(),
    kind: { case: "start", value: startInit(model, options) },
    traceparent: options.traceparent ?? "",
    tracestate: options.tracestate ?? "",
  });
  checkEncodable(frame, "start");
  return frame;
}

/**
 * Throws InvalidRequest for a value that its field cannot hold, which would end the shared stream.
 */
export function checkEncodable(frame: ClientFrame, field: string): void {
  try {
    toBinary(ClientFrameSchema, frame);
  } catch (error) {
    throw invalid(field, error instanceof Error ? error.message : String(error));
  }
}

function startInit(
  model: string,
  options: GenerateOptions,
): MessageInitShape<typeof StartFrameSchema> {
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
    endUser: options.endUser ?? "",
    tier: options.tier === "batch" ? ServiceTier.BATCH : ServiceTier.INTERACTIVE,
    region: options.region ?? "",
    noFallback: options.noFallback ?? false,
    tools: toolsInit(options.tools),
    ...dropUndefined({
      toolChoice: toolChoice(options),
      maxOutputTokens: int64("maxOutputTokens", options.maxOutputTokens),
      maxReasoningTokens: int64("maxReasoningTokens", options.maxReasoningTokens),
      maxCost: options.maxCost && moneyInit(options.maxCost),
      usageIntervalTokens: int64("usageIntervalTokens", options.usageIntervalTokens),
      initialCreditTokens: int64("prefetchTokens", options.prefetchTokens),
      topLogprobs: options.topLogprobs,
      choiceCount: options.choiceCount,
      responseFormat: responseFormat(options),
      beamSearch: beamSearch(options),
      startTimeout: startTimeout === undefined ? undefined : durationFromMs(startTimeout),
    }),
  };
}

function toolsInit(tools: readonly Tool[] = []): MessageInitShape<typeof ToolSchema>[] {
  return tools.map(({ name, description = "", parameters = "", strict = false }) => ({
    name,
    description,
    strict,
    parametersJsonSchema: typeof parameters === "string" ? parameters : JSON.stringify(parameters),
  }));
}

/**
 * Builds the request of a token count.
 *
 * @throws InvalidRequest if not exactly one of prompt and text is given.
 */
export function buildCount(
  model: string,
  options: CountOptions,
): MessageInitShape<typeof CountTokensRequestSchema> {
  checkOptions(options, COUNT);
  const { prompt, text, tools } = options;
  if ((prompt === undefined) === (text === undefined))
    throw invalid("prompt", "give exactly one of: prompt, text");
  return {
    model,
    prompt:
      prompt !== undefined
        ? { case: "conversation", value: conversation(prompt) }
        : { case: "text", value: text ?? "" },
    tools: toolsInit(tools),
  };
}

/**
 * Builds a conversation from a question or from messages.
 *
 * @throws InvalidRequest for a message without role or content, or with an unknown role.
 */
export function conversation(prompt: Prompt): MessageInitShape<typeof ConversationSchema> {
  const messages: readonly Message[] =
    typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
  return {
    messages: messages.map((message, index) => {
      if (typeof message !== "object" || message === null)
        throw invalid(`messages[${index}]`, "must be an object with role and content");
      const role = ROLES[message.role];
      if (role === undefined)
        throw invalid(
          `messages[${index}].role`,
          `'${message.role}' is not one of ${Object.keys(ROLES).join(", ")}`,
        );
      if (typeof message.content !== "string")
        throw invalid(`messages[${index}].content`, "must be a string");
      const toolCalls = (message.toolCalls ?? []).map(({ id, name, argumentsJson }) => ({
        id,
        name,
        argumentsJson,
      }));
      const { content, toolCallId = "", reasoning = "" } = message;
      return { role, content, toolCalls, toolCallId, reasoning };
    }),
  };
}

function promptInit(
  options: GenerateOptions,
): NonNullable<MessageInitShape<typeof StartFrameSchema>["prompt"]> {
  const { prompt, text, tokenIds } = options;
  if ([prompt, text, tokenIds].filter((given) => given !== undefined).length !== 1) {
    throw invalid("prompt", "give exactly one of: prompt, text, tokenIds");
  }
  const { thinking, reasoningEffort = "", continuesLastMessage = false } = options;
  if (prompt !== undefined) {
    const more = { reasoningEffort, continuesLastMessage, ...dropUndefined({ thinking }) };
    return { case: "conversation", value: { ...conversation(prompt), ...more } };
  }
  for (const [name, given] of Object.entries({ thinking, reasoningEffort, continuesLastMessage }))
    if (given) throw invalid(name, "has a meaning only with a prompt of messages: leave it out");
  if (text !== undefined) return { case: "text", value: text };
  return { case: "tokenIds", value: { ids: [...(tokenIds ?? [])] } };
}

function responseFormat(
  options: GenerateOptions,
): MessageInitShape<typeof StartFrameSchema>["responseFormat"] {
  const { jsonSchema, regex, lark } = options;
  if ([jsonSchema, regex, lark].filter((given) => given !== undefined).length > 1) {
    throw invalid("responseFormat", "give at most one of: jsonSchema, regex, lark");
  }
  if (jsonSchema !== undefined) {
    return {
      kind: {
        case: "jsonSchema",
        value: typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema),
      },
    };
  }
  if (regex !== undefined) return { kind: { case: "regex", value: regex } };
  return lark === undefined ? undefined : { kind: { case: "lark", value: lark } };
}

function toolChoice(
  options: GenerateOptions,
): MessageInitShape<typeof StartFrameSchema>["toolChoice"] {
  const { toolChoice: choice, singleToolCall: single = false } = options;
  if (choice === undefined && !single) return undefined;
  if (typeof choice === "object") return { kind: { case: "name", value: choice.name }, single };
  const mode = TOOL_MODES[choice ?? "auto"];
  if (mode === undefined)
    throw invalid("toolChoice", `'${choice}' is not one of ${Object.keys(TOOL_MODES).join(", ")}`);
  return { kind: { case: "mode", value: mode }, single };
}

function beamSearch(
  options: GenerateOptions,
): MessageInitShape<typeof StartFrameSchema>["beamSearch"] {
  const { beamWidth, lengthPenalty, earlyStopping } = options;
  if (beamWidth === undefined) {
    if (lengthPenalty !== undefined)
      throw invalid("lengthPenalty", "has a meaning only with beamWidth");
    if (earlyStopping !== undefined)
      throw invalid("earlyStopping", "has a meaning only with beamWidth");
    return undefined;
  }
  const stopping =
    earlyStopping === "never"
      ? EarlyStopping.NEVER
      : earlyStopping
        ? EarlyStopping.WHEN_FULL
        : EarlyStopping.HEURISTIC;
  return { width: beamWidth, earlyStopping: stopping, ...dropUndefined({ lengthPenalty }) };
}

function startTimeoutMs(options: GenerateOptions): number | undefined {
  const milliseconds = options.startTimeoutMs ?? options.timeoutMs;
  // The caller's own timeout ends the request at once.
  return milliseconds !== undefined && milliseconds > 0 && Number.isFinite(milliseconds)
    ? Math.max(1, milliseconds)
    : undefined;
}

/** Builds the request for vectors of one text or several, each a text or its token ids. */
export function buildEmbed(
  model: string,
  inputs: string | readonly (string | readonly number[])[],
  options: EmbedOptions,
): MessageInitShape<typeof EmbedRequestSchema> & { requestId: string } {
  checkOptions(options, EMBED);
  const texts = typeof inputs === "string" ? [inputs] : inputs;
  texts.forEach((each, index) => {
    if (typeof each !== "string" && !Array.isArray(each))
      throw invalid(`inputs[${index}]`, "give a text or a list of token ids");
  });
  return {
    requestId: options.requestId ?? randomUUID(),
    model,
    inputs: texts.map((each) => ({
      kind:
        typeof each === "string"
          ? { case: "text", value: each }
          : { case: "tokenIds", value: { ids: [...each] } },
    })),
    truncation: options.truncate ? Truncation.END : Truncation.NONE,
    labels: { ...options.labels },
    endUser: options.endUser ?? "",
    tier: options.tier === "batch" ? ServiceTier.BATCH : ServiceTier.INTERACTIVE,
  };
}

/** Builds the frame that requests other limits; omitted ones are unchanged. */
export function buildUpdate(limits: LimitOptions): MessageInitShape<typeof UpdateFrameSchema> {
  checkOptions(limits, LIMITS);
  const { maxOutputTokens, maxCost } = limits;
  return dropUndefined({
    maxOutputTokens: int64("maxOutputTokens", maxOutputTokens),
    maxCost: maxCost && moneyInit(maxCost),
  });
}

function int64(field: string, value: number | bigint | undefined): bigint | undefined {
  if (value === undefined || typeof value === "bigint") return value;
  if (!Number.isSafeInteger(value))
    throw invalid(field, `${value} is not a whole number that can be sent exactly`);
  return BigInt(value);
}

type Defined<T> = { [Key in keyof T]?: Exclude<T[Key], undefined> };

/** Removes undefined keys: every present field is sent. */
export function dropUndefined<T extends object>(value: T): Defined<T> {
  return Object.fromEntries(
    Object.entries(value).filter(([, each]) => each !== undefined),
  ) as Defined<T>;
}
