/** What an exchange needs of the streams that it runs on. */

import type { WeirError } from "./errors.js";
import type { Exchange } from "./exchange.js";
import type { ClientFrame } from "./gen/weir/v1/inference_service_pb.js";

/** The stream that an exchange runs on, as far as the exchange needs it. */
export interface Carrier {
  /** Writes a cancel frame, soon; never blocks. */
  sendCancel(exchange: Exchange): void;
  /** Writes another frame of the request, soon; never blocks. Throws Unavailable if there is no stream. */
  sendUpdate(frame: ClientFrame): void;
  /** Writes a credit frame, soon; never blocks. */
  sendCredit(exchange: Exchange, tokenCount: number): void;
  /** Forgets an exchange that has ended; its later frames are strays. */
  release(exchange: Exchange): void;
}

/** Who brings an exchange to another stream. Both answers are what it ends with, or undefined if it will go on. */
export interface Continuation {
  /** The stream ended under it. */
  broken(cause: WeirError): WeirError | undefined;
  /** The server will not go on with it on this stream. */
  refused(error: WeirError): WeirError | undefined;
  /** It goes on. */
  resumed(): void;
  /** It has ended. */
  stop(): void;
}
