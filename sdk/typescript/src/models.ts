/** What a deployment offers, and what a request to it would be. */

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
  readonly effectiveTime: Date | undefined;
  readonly tier: "interactive" | "batch";
  /** The caller's own price, not that of the list. */
  readonly own: boolean;
}

/** What a model does. UNSPECIFIED: something that is newer than this client. */
export type ModelTask = "UNSPECIFIED" | "GENERATE" | "EMBED";

/** One version of a model. */
export interface ModelVersion {
  readonly version: string;
  /** Of the requests that name no version, 0 to 1. */
  readonly share: number;
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
  /** Kept out of use by an admin. */
  readonly drainedReplicaCount: number;
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
  /** How long to wait, if that helps. */
  readonly retryAfterMs: number | undefined;
  readonly failingQuotas: readonly QuotaStatus[];
  readonly quotas: readonly QuotaStatus[];
}

/** The size of a prompt. */
export interface TokenCount {
  readonly inputTokenCount: number;
  readonly contextWindowTokens: number;
}

/** What a key is good for. */
export interface KeyRestrictions {
  readonly prefix: string;
  readonly scopes: readonly string[];
  /** That it may use; empty: every one. */
  readonly models: readonly string[];
  /** Of one request; undefined: as many as the model takes. */
  readonly maxInputTokens: number | undefined;
  /** Of one request, all choices together. */
  readonly maxOutputTokens: number | undefined;
  /** That it may be used from; empty: everywhere. */
  readonly allowedNetworks: readonly string[];
  /** Of the secret that the client has; undefined: it does not end. */
  readonly secretExpireTime: Date | undefined;
}
