/**
 * One attempt at one request on a stream, as a state machine: frames in, events and exactly one outcome out.
 *
 * Nothing here waits for the network. Memory is bounded: at most `EVENTS_MAX` unread events, far fewer with a `prefetch`, and text no
 * longer than the request's own output.
 */

import type { Carrier, Continuation } from "./carriers.js";
import { Aborted, Cancelled, DeadlineExceeded, FailedPrecondition, IncompleteGeneration, Unavailable, WeirError } from "./errors.js";
import type { ClientFrame, DeltaFrame, FailedFrame, FinishedFrame, ServerFrame } from "./gen/weir/v1/inference_service_pb.js";
import { LimitChanges } from "./limit_changes.js";
import type { Prefetch } from "./prefetch.js";
import { Received } from "./received.js";
import { copyError, errorFromStatus } from "./status.js";
import type { Admitted, Event, Limits, Partial, Result } from "./values.js";
import * as wire from "./wire.js";

const EVENTS_MAX = 65_536; // one delta per token: more than any context window in use; a reader that far behind is gone
const OWNER_AWAY = "OWNER_AWAY"; // the server's reason where it passed on what another one runs, and lost that: no end of the request
const CANCEL_GRACE_MS = 2_000; // how long the final frame may take after a cancel: one engine step and one settlement, with room

/**
 * What has arrived for one request, and how it ended.
 *
 * `outcome` is set once: a `Result`, or the error to throw. After a cancel it is set within `CANCEL_GRACE_MS`, whatever the server
 * does, so that whoever waits for the end never hangs. With a `continuation` it may ride several streams.
 */
export class Exchange {
  outcome: Result | WeirError | undefined;
  /** The server has said anything at all about this request. */
  begun = false;
  cancelled = false;
  /** The caller's timeout passed. */
  expired = false;
  /** On its way to another stream, whose answer has not come yet. */
  suspended = false;
  resumeCount = 0;
  /** Why the server refused it: the reason. */
  refusal = "";
  continuation: Continuation | undefined;

  private events: Event[] = [];
  private readonly received: Received;
  private carrier: Carrier | undefined;
  private readonly limitChanges = new LimitChanges();
  private lost = ""; // the sentence about output that cannot be had any more
  private lostCause: WeirError | undefined;
  private readonly timers: NodeJS.Timeout[] = [];
  private waiters: (() => void)[] = [];

  /** `prefetch`: what the server is granted; undefined: the request needs no credit. */
  constructor(
    readonly requestId: string,
    model: string,
    private readonly afterSeq = 0,
    private readonly prefetch?: Prefetch,
  ) {
    this.received = new Received(requestId, model, afterSeq);
  }

  /** Binds it to the stream that it runs on, or to what looks for one. `creditTokenCount`: what that stream was granted. */
  ride(carrier: Carrier, creditTokenCount = 0): void {
    this.carrier = carrier;
    this.prefetch?.begin(creditTokenCount);
  }

  /** What admission told; undefined until it comes. */
  get admitted(): Admitted | undefined {
    return this.received.admitted;
  }

  /** Of the last frame of output. */
  get seq(): number {
    return this.received.seq;
  }

  /** Ends it as late when so much time is over. */
  expireIn(milliseconds: number): void {
    if (this.outcome !== undefined) return;
    const expire = (): void => {
      this.expired = true;
      this.cancel();
    };
    this.timers.push(setTimeout(expire, Math.min(milliseconds, 2 ** 31 - 1)));
  }

  /** Whether any output has arrived. */
  get delivered(): boolean {
    return this.seq > this.afterSeq;
  }

  /** All events that nobody has taken yet. Whoever does tells with `read` what the caller has got of them. */
  take(): Event[] {
    const taken = this.events;
    this.events = [];
    return taken;
  }

  /** The caller has got so much output more. */
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

  /** Asks for other limits; those that hold then. Rejects with a WeirError if they cannot be had, or the stream breaks meanwhile. */
  async update(frame: ClientFrame): Promise<Limits> {
    const { carrier, requestId } = this;
    if (this.outcome !== undefined || !carrier) throw new FailedPrecondition("the request has ended", { reason: "REQUEST_ENDED", requestId });
    carrier.sendUpdate(frame);
    return await this.limitChanges.expect();
  }

  /** Asks the server to stop; the outcome follows within `CANCEL_GRACE_MS`. Nothing happens after the end or twice. */
  cancel(): void {
    if (this.cancelled || this.outcome !== undefined) return;
    this.cancelled = true;
    this.carrier?.sendCancel(this);
    this.timers.push(setTimeout(() => this.giveUp(), CANCEL_GRACE_MS));
  }

  /** Takes one frame of the server. Kinds that are newer than this client are ignored, and so is all after the end. */
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
        this.push({ type: "resumed", afterSeq: wire.count(afterSeq), lastSeq: wire.count(lastSeq), running });
        this.grant(this.prefetch?.grant(true) ?? 0);
        break;
      }
      case "delta":
        this.receiveDelta(frame.kind.value);
        break;
      case "admitted": {
        const isNews = this.admitted === undefined; // it comes again on each stream
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

  /** The stream ended. A request that had begun goes on elsewhere or is incomplete; one that had not failed as the stream did. */
  breakOff(cause: WeirError): void {
    if (this.outcome !== undefined) return;
    this.carrier = undefined;
    const error = copyError(cause, this.requestId);
    if (!this.begun && !this.suspended) {
      this.end(error);
      return;
    }
    const text = `the stream ended before the request did: ${cause.plainMessage}`;
    const verdict = this.continuation ? this.continuation.broken(error) : this.incomplete(text, error);
    if (verdict) this.fail(verdict);
  }

  /** Nobody can go on with it. If the caller's time is over, that is what it ends with. */
  fail(error: WeirError): void {
    this.end(this.expired ? this.deadlineError() : error);
  }

  /** Output is missing that cannot be had: stops it, and ends it as incomplete with the usage that it is settled with. */
  lose(message: string, cause: WeirError): void {
    this.lost = message;
    this.lostCause = cause;
    this.cancel();
  }

  /** Leaves its stream, to go on elsewhere. */
  release(): void {
    const { carrier, requestId } = this;
    this.limitChanges.fail(new Unavailable("no answer came before the stream ended", { requestId }));
    this.carrier = undefined;
    carrier?.release(this);
  }

  /** Tells the stream that it now rides what the one before could not be told. */
  resendCancel(): void {
    if (this.cancelled) this.carrier?.sendCancel(this);
  }

  /** The error of a request without its proper end. */
  incomplete(message: string, cause?: WeirError): IncompleteGeneration {
    const { requestId } = this;
    return new IncompleteGeneration(message, { code: cause?.code, reason: "INCOMPLETE", requestId, partial: this.partial(), cause });
  }

  /** What is known so far. */
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
    if (seq <= this.seq || this.lost) return; // a repetition: already counted; or a piece behind a gap
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
    if (reason === "DEADLINE" || (this.expired && reason === "CANCELLED")) this.end(this.deadlineError());
    else this.end(this.lost ? this.incomplete(this.lost, this.lostCause) : this.received.result(frame));
  }

  /** The answer to a try to go on: not the end of the request, unless nothing more can be done. */
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
    if (error.reason === OWNER_AWAY && this.continuation) {
      const verdict = this.continuation.broken(error);
      if (verdict) this.fail(verdict);
      return;
    }
    this.end(this.expired && error instanceof Cancelled ? this.deadlineError() : error);
  }

  private failure(frame: FailedFrame): WeirError {
    if (frame.usage) this.received.bill(frame);
    const status = frame.status ?? { $typeName: "google.rpc.Status", code: 13, message: "the server gave no reason", details: [] };
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
    const text = this.lost || `cancelled, but the server did not confirm it within ${CANCEL_GRACE_MS} ms`;
    this.end(this.expired ? this.deadlineError() : this.incomplete(text, this.lostCause));
  }

  private deadlineError(): DeadlineExceeded {
    const text = "the request was not done in the time given and was cancelled";
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
