/**
 * The values that a client hands out: what was generated, what it used, what it costs, what is left.
 *
 * Plain data without any gRPC in it. Counts are in tokens or requests, `Ms` is milliseconds. Money and quota values are `bigint`,
 * because they are exact and may be larger than a `number` holds.
 */

/** Picos (1e-12) in one unit of a currency. */
export const PICOS_PER_UNIT = 1_000_000_000_000n;

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

/** An exact amount of money. */
export class Money {
  /** `picos`: whole picos (1e-12) of one unit of the currency. */
  constructor(
    readonly currencyCode: string,
    readonly picos: bigint,
  ) {}

  /** From units of the currency as a decimal text. Throws a RangeError for what is no amount, or finer than a pico. */
  static of(amount: string, currencyCode: string): Money {
    const [, sign, units, fraction = ""] = /^(-?)(\d+)(?:\.(\d+))?$/.exec(amount) ?? [];
    const digits = fraction.replace(/0+$/, "");
    if (units === undefined || digits.length > 12) {
      throw new RangeError(`'${amount}' is no amount in whole picos: give a text like "0.05"`);
    }
    const picos = BigInt(units) * PICOS_PER_UNIT + BigInt(digits.padEnd(12, "0"));
    return new Money(currencyCode, sign === "-" ? -picos : picos);
  }

  /** The amount in units as an exact decimal, at least two decimals: `0.00184`. */
  get amount(): string {
    const magnitude = this.picos < 0n ? -this.picos : this.picos;
    const fraction = (magnitude % PICOS_PER_UNIT).toString().padStart(12, "0").replace(/0+$/, "").padEnd(2, "0");
    return `${this.picos < 0n ? "-" : ""}${magnitude / PICOS_PER_UNIT}.${fraction}`;
  }

  /** `0.00184 USD`. */
  toString(): string {
    return `${this.amount} ${this.currencyCode}`;
  }

  /** JSON has no exact numbers of this size: both as text. */
  toJSON(): { currencyCode: string; picos: string } {
    return { currencyCode: this.currencyCode, picos: this.picos.toString() };
  }
}

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
  /** For example `TOKENS_PER_MINUTE`. */
  readonly dimension: string;
  readonly limitValue: bigint;
  readonly usedValue: bigint;
  /** Held by requests that run now. */
  readonly heldValue: bigint;
  readonly remainingValue: bigint;
  /** Absent for concurrency. */
  readonly resetTime: Date | undefined;
  /** False: it counts and reports, and refuses nobody. */
  readonly enforced: boolean;
}

/** The request was let in and its tokens are held. */
export interface Admitted {
  readonly type: "admitted";
  readonly inputTokenCount: number;
  readonly predictedCachedTokenCount: number;
  readonly quotas: readonly QuotaStatus[];
  readonly priceVersion: number;
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

/** The size of a prompt. */
export interface TokenCount {
  readonly inputTokenCount: number;
  readonly contextWindowTokens: number;
}

/** One version of a model's price, in picos of the currency per token. */
export interface Price {
  readonly version: number;
  readonly currencyCode: string;
  readonly inputPicosPerToken: bigint;
  readonly cachedInputPicosPerToken: bigint;
  readonly outputPicosPerToken: bigint;
  readonly embeddingPicosPerToken: bigint;
  readonly effectiveTime: Date | undefined;
}

/** What a model does. UNSPECIFIED: something that is newer than this client. */
export type ModelTask = "UNSPECIFIED" | "GENERATE" | "EMBED";

/** One version of a model. */
export interface ModelVersion {
  readonly version: string;
  /** Of the requests that name no version, 0 to 1. */
  readonly share: number;
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

/** One model that can be asked for. */
export interface Model {
  readonly name: string;
  readonly architecture: string;
  readonly contextWindowTokens: number;
  readonly vocabularySize: number;
  readonly engine: string;
  readonly task: ModelTask;
  /** Floats in a vector; 0 if it generates. */
  readonly embeddingDimension: number;
  /** Texts in one call of `embed`; 0 if it generates. */
  readonly embeddingInputCountMax: number;
  /** Other names for it. */
  readonly aliases: readonly string[];
  /** That can be asked for as `name@version`. */
  readonly versions: readonly ModelVersion[];
  readonly readyReplicaCount: number;
  readonly replicaCount: number;
  /** One per service tier. */
  readonly tierPrices: readonly Price[];
  /** That of interactive requests; absent: no price is set. */
  readonly price: Price | undefined;
}

/** What a request would count and cost, and whether it would be let in now. */
export interface Quote {
  readonly inputTokenCount: number;
  readonly predictedCachedTokenCount: number;
  readonly maxOutputTokenCount: number;
  readonly expectedOutputTokenCount: number;
  readonly worstCost: Money;
  readonly expectedCost: Money;
  readonly priceVersion: number;
  readonly wouldAdmit: boolean;
  readonly retryHelps: boolean;
  readonly retryDelayMs: number | undefined;
  readonly failingQuotas: readonly QuotaStatus[];
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
  readonly labels: Readonly<Record<string, string>>;
}
