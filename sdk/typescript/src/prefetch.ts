/** Credit granted to the server: limit of the output in flight or unread. */

/** Tokens, more than any request has: for requests that need credit but no limit. */
export const EVERYTHING = 2 ** 40;
// For a slow reader: far below a server's stall time (60 s), with few frames.
const GRANT_INTERVAL_MS = 5_000;

/**
 * Keeps tokens granted but not received, plus tokens received but unread, at `limit`.
 *
 * Grants when half of it is free, or when some of it is free and the last grant is old enough.
 */
export class Prefetch {
  private outstanding = 0; // granted on this stream, not arrived
  private unread = 0; // arrived, not read
  private grantedAt = performance.now();

  constructor(readonly limit: number) {}

  /** Moves to another stream with this credit; the credit of the previous stream is void. */
  begin(granted: number): void {
    this.outstanding = granted;
    this.grantedAt = performance.now();
  }

  /** Records that so many tokens have arrived. */
  arrived(tokenCount: number): void {
    this.outstanding -= tokenCount;
    this.unread += tokenCount;
  }

  /** Records that the caller has read so many tokens. */
  read(tokenCount: number): void {
    this.unread -= tokenCount;
  }

  /** Returns the tokens to grant now, or 0. `atOnce`: grant all free tokens. */
  grant(atOnce = false): number {
    const room = this.limit - this.outstanding - this.unread;
    const isDue =
      atOnce || 2 * room >= this.limit || performance.now() - this.grantedAt >= GRANT_INTERVAL_MS;
    if (room < 1 || !isDue) return 0;
    this.outstanding += room;
    this.grantedAt = performance.now();
    return room;
  }
}
