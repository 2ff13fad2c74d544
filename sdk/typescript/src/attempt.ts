/**
 * One attempt at a request on a stream, as a state machine: frames in, events and one outcome out.
 *
 * Nothing here waits for the network. Memory is bounded: at most `EVENTS_MAX` unread events, far
 * fewer with a `prefetch`, and text no longer than the request's own output.
 */

import {
  Aborted,
  Cancelled,
  DeadlineExceeded,
  FailedPrecondition,
  IncompleteGeneration,
  Unavailable,
  WeirError,
} from "./errors.js";
import type {
  ClientFrame,
  DeltaFrame,
  FailedFrame,
  FinishedFrame,
  ServerFrame,
  UpdatedFrame,
} from "./gen/weir/v1/inference_service_pb.js";
import { Received } from "./output.js";
import { copyError, errorFromStatus } from "./status.js";
import type { Admitted, Event, Limits, Partial, Result } from "./values.js";
import * as wire from "./wire.js";

const EVENTS_MAX = 65_536; // one delta per token: more than any context window in use
// The relaying server lost the request's owner; the request goes on.
const PROCESS_UNAVAILABLE = "PROCESS_UNAVAILABLE";
const CANCEL_GRACE_MS = 2_000; // wait for the final frame after a cancel
/** Tokens, more than any request has: for requests that need credit but no limit. */
export const EVERYTHING = 2 ** 40;
// For a slow reader: far below a server's stall time (60 s), with few frames.
const GRANT_INTERVAL_MS = 5_000;

/** Stream that an attempt runs on. */
export interface Carrier {
  /** Writes a cancel frame soon; never blocks. */
  sendCancel(attempt: Attempt): void;
  /**
   * Writes another frame of the request soon; never blocks. Throws Unavailable if there is no
   * stream.
   */
  sendUpdate(frame: ClientFrame): void;
  /** Writes a credit frame soon; never blocks. */
  sendCredit(attempt: Attempt, tokenCount: number): void;
  /** Forgets an attempt that has ended; its later frames are ignored. */
  release(attempt: Attempt): void;
}

/**
 * Moves an attempt to another stream.
 *
 * `broken` and `refused` return the final error, or undefined if the attempt will continue.
 */
export interface Continuation {
  /** Handles the end of the stream. */
  broken(cause: WeirError): WeirError | undefined;
  /** Handles the server's refusal to continue on this stream. */
  refused(error: WeirError): WeirError | undefined;
  /** Handles the continuation of the attempt. */
  resumed(): void;
  /** Handles the end of the attempt. */
  stop(): void;
}

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

/** Changes without an answer yet, in their order. */
class LimitChanges {
  private waiting: { resolve(limits: Limits): void; reject(error: WeirError): void }[] = [];

  /** Returns a promise for the answer to the change that is being sent. */
  expect(): Promise<Limits> {
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  /** Resolves the oldest pending change. */
  answer(frame: UpdatedFrame, requestId: string): void {
    const change = this.waiting.shift();
    if (frame.refusal) change?.reject(errorFromStatus(frame.refusal, requestId));
    else change?.resolve(wire.limits(frame));
  }

  /** Rejects all pending changes. */
  fail(error: WeirError): void {
    const left = this.waiting;
    this.waiting = [];
    for (const { reject } of left) reject(error);
  }
}

/**
 * Received frames of one request, and its outcome.
 *
 * `outcome` is set once: a `Result`, or the error to throw. After a cancel it is set within
 * `CANCEL_GRACE_MS`, whatever the server does, so that a caller that waits for the end never hangs.
 * With a `continuation` the attempt can move from stream to stream.
 */
export class Attempt {
  outcome: Result | WeirError | undefined;
  /** True after a frame of this request has arrived. */
  begun = false;
  cancelled = false;
  /** The caller's timeout passed. */
  expired = false;
  /** True while moving to another stream, which has not answered yet. */
  suspended = false;
  resumeCount = 0;
  /** Reason of the server's refusal. */
  refusal = "";
  continuation: Continuation | undefined;

  private events: Event[] = [];
  private readonly received: Received;
  private carrier: Carrier | undefined;
  private readonly limitChanges = new LimitChanges();
  private timeoutMs: number | undefined;
  private lost = ""; // message about output that is no longer available
  private lostCause: WeirError | undefined;
  private readonly timers: NodeJS.Timeout[] = [];
  private waiters: (() => void)[] = [];

  /** `prefetch`: credit granted to the server; undefined: the request needs no credit. */
  constructor(
    readonly requestId: string,
    model: string,
    private readonly afterSeq = 0,
    private readonly prefetch?: Prefetch,
  ) {
    this.received = new Received(requestId, model, afterSeq);
  }

  /**
   * Binds to a stream or to its replacement while there is none. `creditTokenCount`: its granted
   * credit.
   */
  ride(carrier: Carrier, creditTokenCount = 0): void {
    this.carrier = carrier;
    this.prefetch?.begin(creditTokenCount);
  }

  /** The admission, or undefined before it arrives. */
  get admitted(): Admitted | undefined {
    return this.received.admitted;
  }

  /** Sequence number of the last frame of output. */
  get seq(): number {
    return this.received.seq;
  }

  /** Ends the request after this time at the latest. `timeoutMs`: the caller's, for the error. */
  expireIn(milliseconds: number, timeoutMs?: number): void {
    this.timeoutMs = timeoutMs;
    if (this.outcome !== undefined) return;
    const expire = (): void => {
      this.expired = true;
      this.cancel();
    };
    this.timers.push(setTimeout(expire, Math.min(milliseconds, 2 ** 31 - 1)));
  }

  /** True if any output has arrived. */
  get delivered(): boolean {
    return this.seq > this.afterSeq;
  }

  /** Removes and returns all pending events. The caller reports the read ones with `read`. */
  take(): Event[] {
    const taken = this.events;
    this.events = [];
    return taken;
  }

  /** Records that the caller has read so many more tokens of output. */
  read(tokenCount: number): void {
    if (this.prefetch === undefined) return;
    this.prefetch.read(tokenCount);
    this.grant(this.prefetch.grant());
  }

  /** Resolves when there is an event to take or the outcome is known. */
  async wait(): Promise<void> {
    while (this.events.length === 0 && this.outcome === undefined) await this.change();
  }

  /** Resolves when the outcome is known. */
  async waitEnded(): Promise<void> {
    while (this.outcome === undefined) await this.change();
  }

  /**
   * Requests other limits and resolves to the new ones. Rejects with a WeirError if refused or the
   * stream breaks.
   */
  async update(frame: ClientFrame): Promise<Limits> {
    const { carrier, requestId } = this;
    if (this.outcome !== undefined || !carrier)
      throw new FailedPrecondition("the request has ended", { reason: "REQUEST_ENDED", requestId });
    carrier.sendUpdate(frame);
    return await this.limitChanges.expect();
  }

  /** Asks the server to stop; the outcome follows within `CANCEL_GRACE_MS`. Idempotent. */
  cancel(): void {
    if (this.cancelled || this.outcome !== undefined) return;
    this.cancelled = true;
    this.carrier?.sendCancel(this);
    this.timers.push(setTimeout(() => this.giveUp(), CANCEL_GRACE_MS));
  }

  /**
   * Processes one frame of the server. Unknown kinds, and all frames after the end, are ignored.
   */
  receive(frame: ServerFrame): void {
    if (this.outcome !== undefined) return;
    if (this.suspended && frame.kind.case === "failed") {
      this.receiveRefusal(frame.kind.value);
      return;
    }
    if (this.suspended && frame.kind.case !== undefined) this.resume();
    this.begun = true;
    switch (frame.kind.case) {
      case "updated":
        this.limitChanges.answer(frame.kind.value, this.requestId);
        break;
      case "attached": {
        const { afterSeq, lastSeq, running } = frame.kind.value;
        this.push({
          type: "resumed",
          afterSeq: wire.count(afterSeq),
          lastSeq: wire.count(lastSeq),
          running,
        });
        this.grant(this.prefetch?.grant(true) ?? 0);
        break;
      }
      case "delta":
        this.receiveDelta(frame.kind.value);
        break;
      case "admitted": {
        const isNews = this.admitted === undefined; // each stream repeats it
        const admitted = (this.received.admitted = wire.admitted(frame.kind.value));
        if (isNews) this.push(admitted);
        break;
      }
      case "progress":
        this.push(wire.progress(frame.kind.value));
        break;
      case "usage": {
        const usage = (this.received.usage = wire.usage(frame.kind.value.usage));
        const cost = (this.received.cost = wire.money(frame.kind.value.cost));
        this.push({ type: "usage", usage, cost });
        break;
      }
      case "finished":
        this.receiveFinished(frame.kind.value);
        break;
      case "failed":
        this.receiveFailed(frame.kind.value);
        break;
      default:
        break;
    }
  }

  /**
   * Handles the end of the stream. A request that had begun continues elsewhere or ends as
   * incomplete; any other ends with `cause`.
   */
  breakOff(cause: WeirError): void {
    if (this.outcome !== undefined) return;
    this.carrier = undefined;
    const error = copyError(cause, this.requestId);
    if (!this.begun && !this.suspended) {
      this.end(error);
      return;
    }
    const text = `the stream ended before the request did: ${cause.plainMessage}`;
    const verdict = this.continuation
      ? this.continuation.broken(error)
      : this.incomplete(text, error);
    if (verdict) this.fail(verdict);
  }

  /** Ends with an error, or as DeadlineExceeded if the caller's time has passed. */
  fail(error: WeirError): void {
    this.end(this.expired ? this.deadlineError() : error);
  }

  /** Cancels because output is missing; ends as incomplete with the settled usage. */
  lose(message: string, cause: WeirError): void {
    this.lost = message;
    this.lostCause = cause;
    this.cancel();
  }

  /** Leaves the current stream, to continue on another. */
  release(): void {
    const { carrier, requestId } = this;
    this.limitChanges.fail(
      new Unavailable("no answer came before the stream ended", { requestId }),
    );
    this.carrier = undefined;
    carrier?.release(this);
  }

  /** Repeats the cancel on the present stream; the previous one did not deliver it. */
  resendCancel(): void {
    if (this.cancelled) this.carrier?.sendCancel(this);
  }

  /** Returns the error of a request that ended without a final frame. */
  incomplete(message: string, cause?: WeirError): IncompleteGeneration {
    const { requestId } = this;
    return new IncompleteGeneration(message, {
      code: cause?.code,
      reason: "INCOMPLETE",
      requestId,
      partial: this.partial(),
      cause,
    });
  }

  /** Returns the output and usage received so far. */
  partial(): Partial {
    return this.received.partial();
  }

  private grant(tokenCount: number): void {
    if (tokenCount > 0 && this.outcome === undefined) this.carrier?.sendCredit(this, tokenCount);
  }

  private change(): Promise<void> {
    return new Promise((resolve) => this.waiters.push(resolve));
  }

  private changed(): void {
    const waiters = this.waiters;
    this.waiters = [];
    for (const resolve of waiters) resolve();
  }

  private receiveDelta(frame: DeltaFrame): void {
    const seq = wire.count(frame.seq);
    if (seq <= this.seq || this.lost) return; // a repetition already counted, or output after a gap
    if (seq !== this.seq + 1) {
      this.cancel();
      this.end(this.incomplete(`output is missing between frame ${this.seq} and frame ${seq}`));
      return;
    }
    this.prefetch?.arrived(frame.tokenIds.length);
    this.push(this.received.add(frame));
  }

  private receiveFinished(frame: FinishedFrame): void {
    const reason = this.received.finish(frame);
    if (reason === "DEADLINE" || (this.expired && reason === "CANCELLED"))
      this.end(this.deadlineError());
    else
      this.end(
        this.lost ? this.incomplete(this.lost, this.lostCause) : this.received.result(frame),
      );
  }

  /** Handles the refusal of a resumption, which ends the request only as a last resort. */
  private receiveRefusal(frame: FailedFrame): void {
    const error = this.failure(frame);
    const verdict = this.continuation ? this.continuation.refused(error) : error;
    if (verdict) this.fail(verdict);
  }

  private resume(): void {
    this.suspended = false;
    if (this.begun) this.resumeCount += 1;
    this.continuation?.resumed();
  }

  private receiveFailed(frame: FailedFrame): void {
    const error = this.failure(frame);
    if (error.reason === PROCESS_UNAVAILABLE && this.continuation) {
      const verdict = this.continuation.broken(error);
      if (verdict) this.fail(verdict);
      return;
    }
    this.end(this.expired && error instanceof Cancelled ? this.deadlineError() : error);
  }

  private failure(frame: FailedFrame): WeirError {
    if (frame.usage) this.received.bill(frame);
    const status = frame.status ?? {
      $typeName: "google.rpc.Status",
      code: 13,
      message: "the server gave no reason",
      details: [],
    };
    const error = errorFromStatus(status, this.requestId, this.partial());
    this.refusal = error.reason;
    return error;
  }

  private push(event: Event): void {
    if (this.events.length >= EVENTS_MAX) {
      this.cancel();
      const { requestId } = this;
      const text = `${EVENTS_MAX} events of this request were waiting to be read`;
      this.end(new Aborted(text, { reason: "SLOW_CONSUMER", requestId, partial: this.partial() }));
      return;
    }
    this.events.push(event);
    this.changed();
  }

  private giveUp(): void {
    const text =
      this.lost || `cancelled, but the server did not confirm it within ${CANCEL_GRACE_MS} ms`;
    this.end(this.expired ? this.deadlineError() : this.incomplete(text, this.lostCause));
  }

  private deadlineError(): DeadlineExceeded {
    const { timeoutMs } = this;
    const given = timeoutMs === undefined ? "its deadline" : `${timeoutMs} ms (timeoutMs)`;
    const text = `the request did not end within ${given} and was cancelled`;
    return new DeadlineExceeded(text, { requestId: this.requestId, partial: this.partial() });
  }

  private end(outcome: Result | WeirError): void {
    if (this.outcome !== undefined) return;
    this.outcome = outcome;
    for (const timer of this.timers) clearTimeout(timer);
    this.release();
    this.continuation?.stop();
    this.changed();
  }
}
