/**
 * Client of Weir, the metered LLM inference service. `WeirClient` generates; errors derive from
 * `WeirError`.
 */

export * from "./admin.js";
export * from "./billing.js";
export { WeirClient } from "./client.js";
export {
  type CallOptionsOf as CallOptions,
  type ClientOptions,
  DEFAULT_ADDRESS,
} from "./connection.js";
export * from "./errors.js";
export { Generation as GenerationStream } from "./generation.js";
export type * from "./generated_calls.js";
export * from "./generated_values.js";
export type { KeySource } from "./key.js";
export * from "./money.js";
export * from "./options.js";
export * from "./receipts.js";
export * from "./values.js";
