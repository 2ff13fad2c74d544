/** Checks of arguments that no request message can hold, before anything is sent. */

import { InvalidRequest, NO_DETAILS } from "./errors.js";
import { Money } from "./money.js";
import type {
  AttachOptions,
  CountOptions,
  EmbedOptions,
  GenerateOptions,
  LimitOptions,
  Tool,
  OwnUsageOptions,
} from "./options.js";

const LISTED_MAX = 20; // known options that an error lists
// Options of OpenAI's clients, without underscores, and what to do instead.
const HINTS: Readonly<Record<string, string>> = {
  system: 'begin the prompt with { role: "system", content: ... }',
  messages: "give the messages as prompt",
  input: "give the question or the messages as prompt",
  responseformat: "use jsonSchema",
  n: "use choiceCount",
  numbeams: "use beamWidth",
  logprobs: "use topLogprobs",
  stream: "generate() streams, and complete() returns the whole answer",
  user: "use labels, which are stored with the usage",
  metadata: "use labels, which are stored with the usage",
  paralleltoolcalls: "use singleToolCall: true for at most one call",
  servicetier: "use tier",
};

/** Test of a value, and the description of valid values. */
type Check = readonly [fits: (value: unknown) => boolean, what: string];

const TEXT: Check = [(value) => typeof value === "string", "a text"];
const TEXTS: Check = [
  (value) => typeof value === "string" || isListOf(value, "string"),
  "a string or a list of strings",
];
const NUMBER: Check = [(value) => typeof value === "number" && !Number.isNaN(value), "a number"];
const WHOLE: Check = [
  (value) => typeof value === "bigint" || Number.isSafeInteger(value),
  "a whole number",
];
const MILLISECONDS: Check = [NUMBER[0], "a number of milliseconds"];
const IDS: Check = [
  (value) => isListOf(value, "number") || ArrayBuffer.isView(value),
  "a list of token ids",
];
const BOOLEAN: Check = [(value) => typeof value === "boolean", "true or false"];
const LABELS: Check = [
  (value) => isObject(value) && isListOf(Object.values(value), "string"),
  "an object of strings",
];
const TIER: Check = [
  (value) => value === "interactive" || value === "batch",
  '"interactive" or "batch"',
];
const SIGNAL: Check = [(value) => value instanceof AbortSignal, "an AbortSignal"];
const MONEY: Check = [
  (value) => value instanceof Money,
  'Money, for example Money.of("0.05", "USD")',
];

const COMMON = {
  labels: LABELS,
  endUser: TEXT,
  requestId: TEXT,
  tier: TIER,
  timeoutMs: MILLISECONDS,
  signal: SIGNAL,
};

/** Options of `generate`. */
export const GENERATE: Readonly<Record<keyof GenerateOptions, Check>> = {
  ...COMMON,
  prompt: [
    (value) => typeof value === "string" || Array.isArray(value),
    "a string or a list of messages",
  ],
  text: TEXT,
  tokenIds: IDS,
  maxOutputTokens: WHOLE,
  maxCost: MONEY,
  temperature: NUMBER,
  topP: NUMBER,
  topK: WHOLE,
  seed: WHOLE,
  minP: NUMBER,
  repetitionPenalty: NUMBER,
  presencePenalty: NUMBER,
  frequencyPenalty: NUMBER,
  logitBias: [
    (value) => isObject(value) && isListOf(Object.values(value), "number"),
    "an object of numbers by token id",
  ],
  stop: TEXTS,
  stopTokenIds: IDS,
  minOutputTokens: WHOLE,
  thinking: BOOLEAN,
  reasoningEffort: TEXT,
  continuesLastMessage: BOOLEAN,
  maxReasoningTokens: WHOLE,
  ignoreEos: BOOLEAN,
  jsonSchema: [(value) => typeof value === "string" || isObject(value), "an object, or its text"],
  regex: TEXT,
  lark: TEXT,
  tools: [
    (value) =>
      Array.isArray(value) && value.every((each) => isObject(each) && TEXT[0]((each as Tool).name)),
    "a list of tools",
  ],
  toolChoice: [
    (value) => typeof value === "string" || isObject(value),
    '"auto", "none", "required" or a tool',
  ],
  singleToolCall: BOOLEAN,
  choiceCount: WHOLE,
  beamWidth: WHOLE,
  lengthPenalty: NUMBER,
  earlyStopping: [
    (value) => typeof value === "boolean" || value === "never",
    'true, false or "never"',
  ],
  topLogprobs: WHOLE,
  usageIntervalTokens: WHOLE,
  region: TEXT,
  noFallback: BOOLEAN,
  traceparent: TEXT,
  tracestate: TEXT,
  startTimeoutMs: [
    (value) => MILLISECONDS[0](value) && Number(value) > 0,
    "a number of milliseconds above 0, or absent for `timeoutMs`",
  ],
  maxRetries: WHOLE,
  keepOnDisconnectMs: MILLISECONDS,
  prefetchTokens: [
    (value) => Number.isSafeInteger(value) && Number(value) >= 1,
    "a whole number of at least 1, or absent for no limit",
  ],
};

/** Options of `attach`. */
export const ATTACH: Readonly<Record<keyof AttachOptions, Check>> = {
  afterSeq: WHOLE,
  timeoutMs: MILLISECONDS,
  resumeMs: MILLISECONDS,
  prefetchTokens: GENERATE.prefetchTokens,
  signal: SIGNAL,
};

/** Options of `usage`. */
export const USAGE: Readonly<Record<keyof OwnUsageOptions, Check>> = {
  month: TEXT,
  firstDay: TEXT,
  lastDay: TEXT,
  by: [
    (value) =>
      Array.isArray(value) &&
      value.every((each) => /^(day|hour|model|end_user|label:.+)$/s.test(String(each))),
    'a list of "day", "hour", "model", "end_user" and "label:KEY"',
  ],
  model: TEXT,
  endUser: TEXT,
  labels: LABELS,
  project: BOOLEAN,
};

/** Options of `update`. */
export const LIMITS: Readonly<Record<keyof LimitOptions, Check>> = {
  maxOutputTokens: WHOLE,
  maxCost: MONEY,
};

/** Options of `countTokens`. */
export const COUNT: Readonly<Record<keyof CountOptions, Check>> = {
  prompt: GENERATE.prompt,
  text: TEXT,
  tools: GENERATE.tools,
};

/** Options of `embed`. */
export const EMBED: Readonly<Record<keyof EmbedOptions, Check>> = {
  ...COMMON,
  truncate: BOOLEAN,
  maxRetries: WHOLE,
};

/** Tells if a call of this client has an option of this name. */
export function isOption(name: string): boolean {
  return [GENERATE, ATTACH, USAGE, LIMITS, COUNT, EMBED].some((known) => name in known);
}

/** Returns an `InvalidRequest` that names one field. */
export function invalid(field: string, description: string): InvalidRequest {
  const details = {
    ...NO_DETAILS,
    reason: "FIELD_INVALID",
    fieldViolations: [{ field, description }],
  };
  return new InvalidRequest(`${field}: ${description}`, { details });
}

/** Throws InvalidRequest for an unknown option or an invalid value. */
export function checkOptions(options: object, known: Readonly<Record<string, Check>>): void {
  if (!isObject(options))
    throw invalid(
      "options",
      `must be an object, for example { prompt: "Hello" }, not ${typeof options}`,
    );
  checkKnown(options, Object.keys(known));
  for (const [name, value] of Object.entries(options)) {
    const [fits, what] = known[name]!;
    if (value !== undefined && !fits(value)) {
      const other = typeof value === "number" ? value : typeof value;
      throw invalid(name, `must be ${what}, not ${isObject(value) ? "an object" : other}`);
    }
  }
}

/** Throws InvalidRequest for an unknown option, with its remedy or the nearest known one. */
export function checkKnown(options: object, known: readonly string[]): void {
  for (const name of Object.keys(options)) {
    if (known.includes(name)) continue;
    const listed = known.length <= LISTED_MAX ? `there are ${known.join(", ")}` : "";
    const hint = (known.includes("prompt") && HINTS[plain(name)]) || nearest(name, known) || listed;
    throw invalid(name, `no such option${hint && "; "}${hint}`);
  }
}

/** Asks for the known name with the most pairs of letters in common, if they are half of all. */
function nearest(name: string, known: readonly string[]): string {
  const pairs = (word: string): string[] =>
    [...plain(word)].slice(1).map((letter, index) => plain(word)[index] + letter);
  const own = pairs(name);
  let [best, most] = ["", 0.5];
  for (const other of known) {
    const left = pairs(other);
    const total = own.length + left.length;
    const common = own.filter((pair) => {
      const index = left.indexOf(pair);
      if (index >= 0) left.splice(index, 1);
      return index >= 0;
    });
    const share = (2 * common.length) / total;
    if (share >= most) [best, most] = [other, share];
  }
  return best && `did you mean ${best}?`;
}

/** Returns a name without the differences between `maxTokens`, `max_tokens` and `maxtokens`. */
function plain(name: string): string {
  return name.toLowerCase().replaceAll("_", "");
}

function isObject(value: unknown): value is object {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isListOf(value: unknown, kind: "string" | "number"): boolean {
  return Array.isArray(value) && value.every((each) => typeof each === kind);
}
