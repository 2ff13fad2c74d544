/** Models of a deployment, and quotes of requests. */

import type { Money } from "./money.js";
import type { QuotaStatus } from "./values.js";

/** One version of a model's price, in picos of the currency per token. */
export interface Price {
  readonly version: number;
  readonly currencyCode: string;
  readonly inputPicosPerToken: bigint;
  readonly cachedInputPicosPerToken: bigint;
  readonly outputPicosPerToken: bigint;
  readonly embeddingPicosPerToken: bigint;
  /** Of the output that is thinking. */
  readonly reasoningPicosPerToken: bigint;
  readonly effectiveTime: Date | undefined;
  readonly tier: "interactive" | "batch";
  /** The caller's own price instead of the list price. */
  readonly own: boolean;
}

/** Task of a model. UNSPECIFIED: a task newer than this client. */
export type ModelTask = "UNSPECIFIED" | "GENERATE" | "EMBED";

/** One version of a model. */
export interface ModelVersion {
  readonly version: string;
  /** Fraction of the requests without a version, 0 to 1. */
  readonly share: number;
}

/** A request field that a model's engine refuses. */
export interface RefusedField {
  /** Path in the start frame, for example `sampling.min_p`. */
  readonly field: string;
  /** The refused values; empty: all that have an effect. */
  readonly values: string;
}

/** One available model. */
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
  /** Requested as `name@version`. */
  readonly versions: readonly ModelVersion[];
  readonly readyReplicaCount: number;
  readonly replicaCount: number;
  /** Drained by an admin. */
  readonly drainedReplicaCount: number;
  /** What embedded engines compute with; `torch` is slow. */
  readonly kernels: readonly string[];
  /** Fields that its engine would ignore. */
  readonly refusedFields: readonly RefusedField[];
  /** Its engine reports no token ids: each is 2147483647. */
  readonly countsFromUsage: boolean;
  /** One per service tier. */
  readonly tierPrices: readonly Price[];
  /** For interactive requests; undefined: no price is set. */
  readonly price: Price | undefined;
}

/** Tokens and cost of a request, and whether it would be admitted now. */
export interface Quote {
  readonly inputTokenCount: number;
  readonly predictedCachedTokenCount: number;
  readonly maxOutputTokenCount: number;
  readonly expectedOutputTokenCount: number;
  readonly worstCaseCost: Money;
  readonly expectedCost: Money;
  readonly priceVersion: number;
  readonly wouldAdmit: boolean;
  readonly retryHelps: boolean;
  /** Milliseconds to wait, if that helps. */
  readonly retryAfterMs: number | undefined;
  readonly failingQuotas: readonly QuotaStatus[];
  readonly quotas: readonly QuotaStatus[];
}

/** The size of a prompt. */
export interface TokenCount {
  readonly inputTokenCount: number;
  readonly contextWindowTokens: number;
}

/** A change that gave a key a new secret or more rights. */
export interface KeyChange {
  /** "rotated" or "widened": more scopes, more networks, or a longer life. */
  readonly act: string;
  /** Prefix of the key that made it. */
  readonly actor: string;
  readonly changeTime: Date | undefined;
}

/** Permissions of a key. */
export interface KeyRestrictions {
  readonly prefix: string;
  readonly scopes: readonly string[];
  /** Allowed models; empty: all. */
  readonly models: readonly string[];
  /** Per request; undefined: the model's own limit. */
  readonly maxInputTokens: number | undefined;
  /** Per request, all choices together. */
  readonly maxOutputTokens: number | undefined;
  /** Allowed client networks; empty: all. */
  readonly allowedNetworks: readonly string[];
  /** Unknown parameters over HTTP are refused. */
  readonly strictParameters: boolean;
  /** Of the secret in use; undefined: never. */
  readonly secretExpireTime: Date | undefined;
  /** Undefined: never rotated or widened. */
  readonly latestChange: KeyChange | undefined;
}
