/** Interfaces between an exchange and its streams. */

import type { WeirError } from "./errors.js";
import type { Exchange } from "./exchange.js";
import type { ClientFrame } from "./gen/weir/v1/inference_service_pb.js";

/** Stream that an exchange runs on. */
export interface Carrier {
  /** Writes a cancel frame soon; never blocks. */
  sendCancel(exchange: Exchange): void;
  /**
   * Writes another frame of the request soon; never blocks. Throws Unavailable if there is no
   * stream.
   */
  sendUpdate(frame: ClientFrame): void;
  /** Writes a credit frame soon; never blocks. */
  sendCredit(exchange: Exchange, tokenCount: number): void;
  /** Forgets an exchange that has ended; its later frames are ignored. */
  release(exchange: Exchange): void;
}

/**
 * Moves an exchange to another stream.
 *
 * `broken` and `refused` return the final error, or undefined if the exchange will continue.
 */
export interface Continuation {
  /** Handles the end of the stream. */
  broken(cause: WeirError): WeirError | undefined;
  /** Handles the server's refusal to continue on this stream. */
  refused(error: WeirError): WeirError | undefined;
  /** Handles the continuation of the exchange. */
  resumed(): void;
  /** Handles the end of the exchange. */
  stop(): void;
}
