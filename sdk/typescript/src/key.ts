/**
 * API key of a client: a text, or a function that returns a short-lived token.
 *
 * Decides when the function is called: at the first use, before the token expires, and after the
 * server has refused it.
 */

import { Unauthenticated } from "./errors.js";

/** A key, or a function that returns a token. */
export type KeySource = string | (() => string | Promise<string>);

// Before its expiry; a token that lives shorter is renewed after four fifths of its life.
const RENEWED_BEFORE_MS = 30_000;
const FUNCTION_FAILED = "API_KEY_FUNCTION_FAILED"; // this client's reason

/** Key that a connection sends. */
export class CurrentKey {
  text: string;
  private readonly get: (() => string | Promise<string>) | undefined;
  private isDue: boolean;
  private renewAt = Infinity; // of the monotonic clock
  private renewal: Promise<void> | undefined;

  constructor(given: KeySource) {
    this.text = typeof given === "string" ? given : "";
    this.get = typeof given === "string" ? undefined : given;
    this.isDue = this.get !== undefined;
  }

  /** Forgets a key that the server has refused. Returns whether another one can be had. */
  refused(text: string): boolean {
    if (this.get !== undefined && text === this.text) this.isDue = true;
    return this.get !== undefined;
  }

  /** Returns whether the next call has another key after this error. */
  renews(error: unknown): boolean {
    return (
      this.get !== undefined &&
      error instanceof Unauthenticated &&
      error.reason !== FUNCTION_FAILED
    );
  }

  /**
   * Calls the function if a key is missing or due; undefined if none is. Concurrent calls share
   * one. Rejects with Unauthenticated if the function fails.
   */
  renewed(): Promise<void> | undefined {
    const { get } = this;
    if (get === undefined || !(this.isDue || performance.now() >= this.renewAt)) return undefined;
    this.renewal ??= this.renew(get).finally(() => (this.renewal = undefined));
    return this.renewal;
  }

  private async renew(get: () => string | Promise<string>): Promise<void> {
    let key: unknown;
    try {
      key = await get();
    } catch (cause) {
      const message = `the function apiKey failed: ${String(cause)}`;
      throw new Unauthenticated(message, { reason: FUNCTION_FAILED, cause });
    }
    this.text = checkedKey(key, FUNCTION_FAILED);
    this.isDue = false;
    this.renewAt = performance.now() + lifetimeMs(this.text);
  }
}

/** Returns a key without white space around it. Throws Unauthenticated. */
export function checkedKey(key: unknown, reason?: string): string {
  if (typeof key !== "string")
    throw new Unauthenticated(`the API key must be a string, not ${typeof key}`, { reason });
  if (!/^[\x00-\x7f]*$/.test(key))
    throw new Unauthenticated(
      "the API key holds characters that no key has; was it copied in full?",
      { reason },
    );
  return key.trim();
}

/**
 * Returns the milliseconds for which to use a token: unlimited if it does not tell its expiry. A
 * token that has expired by this machine's clock is used too: the clock may be wrong.
 */
function lifetimeMs(token: string): number {
  const parts = token.split(".");
  if (parts.length !== 3) return Infinity;
  try {
    const { exp } = JSON.parse(Buffer.from(parts[1]!, "base64url").toString()) as { exp?: unknown };
    const left = typeof exp === "number" ? exp * 1000 - Date.now() : 0;
    return left > 0 ? Math.max(left - RENEWED_BEFORE_MS, left * 0.8) : Infinity;
  } catch {
    return Infinity;
  }
}
