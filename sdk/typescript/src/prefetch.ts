/** How much output of one request may be on its way or unread: the credit that its server is granted. */

/** Tokens: more than any request has. For those that need credit although this client wants to hold nothing back. */
export const EVERYTHING = 2 ** 40;
const GRANT_INTERVAL_MS = 5_000; // a slow reader grants as often: far below what a server waits for credit (60 s), and hardly any frames

/**
 * Keeps what was granted on this stream and has not arrived, together with what has arrived and was not read, at `limit` tokens.
 *
 * It grants when half of that is free, or some of it and the last grant is a while ago.
 */
export class Prefetch {
  private outstanding = 0; // granted on this stream, not arrived
  private unread = 0; // arrived, not read
  private grantedAt = performance.now();

  constructor(readonly limit: number) {}

  /** The request goes to another stream, with so much credit: that of the one before is void, and with it what was on its way. */
  begin(granted: number): void {
    this.outstanding = granted;
    this.grantedAt = performance.now();
  }

  /** So many tokens more. */
  arrived(tokenCount: number): void {
    this.outstanding -= tokenCount;
    this.unread += tokenCount;
  }

  /** The caller has so many tokens more. */
  read(tokenCount: number): void {
    this.unread -= tokenCount;
  }

  /** Tokens to grant now; 0: none. `atOnce`: all that there is room for. */
  grant(atOnce = false): number {
    const room = this.limit - this.outstanding - this.unread;
    const isDue = atOnce || 2 * room >= this.limit || performance.now() - this.grantedAt >= GRANT_INTERVAL_MS;
    if (room < 1 || !isDue) return 0;
    this.outstanding += room;
    this.grantedAt = performance.now();
    return room;
  }
}
