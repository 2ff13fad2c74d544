/**
 * Resumption of requests on another stream (docs/how-to/resume-a-stream.md).
 *
 * A state machine on timers, so that it can be stopped at any moment.
 */

import { create } from "@bufbuild/protobuf";
import type { Attempt, Carrier, Continuation } from "./attempt.js";
import {
  Cancelled,
  FailedPrecondition,
  InvalidRequest,
  PermissionDenied,
  ResourceExhausted,
  Unauthenticated,
  Unavailable,
  WeirError,
} from "./errors.js";
import { type ClientFrame, ClientFrameSchema } from "./gen/weir/v1/inference_service_pb.js";
import { type SharedStream, UNREADABLE } from "./stream.js";

/** Default: covers a restart of a load balancer or a change of network. */
export const RESUME_MS = 30_000;
export const REQUEST_IN_FLIGHT = "REQUEST_IN_FLIGHT";
export const REQUEST_SETTLED = "REQUEST_SETTLED";
export const OUTPUT_GONE = "OUTPUT_GONE";
const REQUEST_UNKNOWN = "REQUEST_UNKNOWN";
// Before the first try, with jitter: all clients of a lost server reconnect at once.
const WAIT_FIRST_MS = 50;
const WAIT_BASE_MS = 100; // before the second try without a retry-after of the server; doubles
const WAIT_MAX_MS = 5_000; // between two tries, unless the server asks for more
const FINAL = [Unauthenticated, PermissionDenied, InvalidRequest, FailedPrecondition];

/**
 * Moves one attempt from stream to stream; its carrier while it has no stream.
 *
 * `frame` began the request: a start or an attach. Tries for `keepMs` from each break, as long as
 * the server keeps the request.
 */
export class Resumption implements Carrier, Continuation {
  private isRenewed = false; // the last try was refused for its key
  private again = false; // the next try repeats the start frame
  private skipTo: number | undefined; // seq to attach at if earlier output is lost
  private tryCount = 0;
  private cause: WeirError | undefined;
  private tryTimer: NodeJS.Timeout | undefined;
  private endTimer: NodeJS.Timeout | undefined;

  constructor(
    private readonly stream: SharedStream,
    private readonly attempt: Attempt,
    private readonly frame: ClientFrame,
    private readonly keepMs: number,
  ) {
    attempt.continuation = this;
  }

  /**
   * Attaches to a request that this client did not start. Throws Cancelled if the client is closed.
   */
  begin(): void {
    this.stream.checkOpen(this.attempt.requestId);
    this.suspend();
    this.try();
  }

  /** Looks for another stream, unless it would fail in the same way. */
  broken(cause: WeirError): WeirError | undefined {
    if (this.isKeyDue(cause)) return this.wait(cause);
    if (FINAL.some((kind) => cause instanceof kind) || cause.reason === UNREADABLE)
      return this.ended(cause);
    return this.wait(cause);
  }

  /** Handles the refusal of an `attach` or of a repeated start frame. */
  refused(error: WeirError): WeirError | undefined {
    const { attempt } = this;
    if (
      error instanceof Unavailable ||
      error.reason === REQUEST_IN_FLIGHT ||
      this.isKeyDue(error)
    )
      return this.wait(error);
    // The first response to the request, or an ordinary refusal.
    if (!attempt.begun || this.again) return error;
    const canStart = this.frame.kind.case === "start" && !attempt.delivered && !attempt.cancelled;
    if (error.reason === REQUEST_UNKNOWN && canStart) {
      this.again = true;
      return this.wait(error);
    }
    if (error.reason === OUTPUT_GONE && this.skipTo === undefined) {
      this.skipTo = Number(error.metadata["last_seq"] ?? attempt.seq);
      this.suspend();
      attempt.lose(`output after frame ${attempt.seq} is no longer kept`, error);
      this.try();
      return undefined;
    }
    return this.ended(error);
  }

  /** Stops the timers: the server continues the request on the new stream. */
  resumed(): void {
    this.stop();
    this.tryCount = 0;
    this.again = this.isRenewed = false;
  }

  /** Cancels all timers. */
  stop(): void {
    clearTimeout(this.tryTimer);
    clearTimeout(this.endTimer);
    this.tryTimer = this.endTimer = undefined;
    this.stream.forget(this.attempt);
  }

  /** Tries now: the server does not know of the cancel yet. */
  sendCancel(): void {
    if (this.tryTimer !== undefined) this.try();
  }

  /** Refuses: there is no stream. Throws Unavailable. */
  sendUpdate(): void {
    throw new Unavailable("the connection is broken: retry after it is restored", {
      requestId: this.attempt.requestId,
    });
  }

  /** Does nothing: the next stream is granted all free credit. */
  sendCredit(): void {}

  /** Does nothing: `stop` follows. */
  release(): void {}

  /** Returns whether the key of the stream was refused, and the next stream has another. */
  private isKeyDue(error: WeirError): boolean {
    const isDue = this.attempt.begun && this.stream.renews(error) && !this.isRenewed;
    this.isRenewed ||= isDue;
    return isDue;
  }

  private suspend(): void {
    this.attempt.release();
    this.attempt.suspended = true;
    this.attempt.ride(this);
    this.stream.suspend(this.attempt);
    this.endTimer ??= setTimeout(() => this.giveUp(), Math.min(this.keepMs, 2 ** 31 - 1));
  }

  private wait(cause: WeirError): undefined {
    this.suspend();
    this.cause = cause;
    const spreadMs = this.tryCount
      ? Math.min(WAIT_BASE_MS * 2 ** (this.tryCount - 1), WAIT_MAX_MS)
      : WAIT_FIRST_MS;
    const waitMs = (cause.retryAfterMs ?? 0) + spreadMs * (0.5 + Math.random() / 2);
    this.tryCount += 1;
    this.tryTimer = setTimeout(
      () => this.try(),
      this.attempt.cancelled ? Math.min(waitMs, WAIT_BASE_MS) : waitMs,
    );
    return undefined;
  }

  private try(): void {
    clearTimeout(this.tryTimer);
    this.tryTimer = undefined;
    const { attempt } = this;
    if (attempt.outcome !== undefined) return;
    if (this.again && attempt.cancelled) {
      attempt.fail(
        new Cancelled("cancelled before its admission", { requestId: attempt.requestId }),
      );
      return;
    }
    try {
      this.stream.resume(attempt, this.nextFrame());
    } catch (error) {
      if (error instanceof ResourceExhausted) this.wait(error);
      else if (error instanceof WeirError) attempt.fail(error);
      else throw error;
      return;
    }
    this.stream.forget(attempt);
    attempt.resendCancel();
  }

  private nextFrame(): ClientFrame {
    if (this.again) return this.frame;
    const { requestId, seq } = this.attempt;
    return create(ClientFrameSchema, {
      requestId,
      kind: { case: "attach", value: { afterSeq: BigInt(this.skipTo ?? seq) } },
    });
  }

  /** Returns the final error of the request, with the received output and the bill. */
  private ended(error: WeirError): WeirError {
    const { attempt } = this;
    if (!attempt.begun) return error;
    if (error.reason === REQUEST_SETTLED) {
      const how = error.metadata["outcome"] || "ended";
      return attempt.incomplete(
        `the request was settled (${how}) while the stream was broken, and its output is not kept`,
        error,
      );
    }
    return attempt.incomplete(
      `the stream ended before the request did, and could not be resumed: ${error.plainMessage}`,
      error,
    );
  }

  private giveUp(): void {
    this.endTimer = undefined;
    const { requestId } = this.attempt;
    this.attempt.fail(
      this.ended(
        this.cause ??
          new Unavailable(`no server could be reached for ${this.keepMs} ms`, { requestId }),
      ),
    );
  }
}
