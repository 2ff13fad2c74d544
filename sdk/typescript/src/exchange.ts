/**
 * One attempt at one request on a stream, as a state machine: frames in, events and exactly one outcome out.
 *
 * Nothing here waits for the network. Memory is bounded: at most `EVENTS_MAX` unread events, and text no longer than the request's
 * own output.
 */

import { Aborted, Cancelled, DeadlineExceeded, IncompleteGeneration, WeirError } from "./errors.js";
import type { DeltaFrame, FailedFrame, FinishedFrame, ServerFrame } from "./gen/weir/v1/inference_service_pb.js";
import { copyError, errorFromStatus } from "./status.js";
import type { Admitted, Choice, Event, FinishReason, Money, Partial, Result, Timings, TokenLogprobs, Usage } from "./values.js";
import * as wire from "./wire.js";

const EVENTS_MAX = 65_536; // one delta per token: more than any context window in use; a reader that far behind is gone
const CHOICES_MAX = 1024; // far above what a server allows: a wrong index must not take all memory
const CANCEL_GRACE_MS = 2_000; // how long the final frame may take after a cancel: one engine step and one settlement, with room

/** The stream that an exchange runs on, as far as the exchange needs it. */
export interface Carrier {
  /** Writes a cancel frame, soon; never blocks. */
  sendCancel(exchange: Exchange): void;
  /** Forgets an exchange that has ended; its later frames are strays. */
  release(exchange: Exchange): void;
}

/** What has arrived of one choice. */
class Output {
  private readonly texts: string[] = [];
  private readonly tokenIds: number[] = [];
  private readonly logprobs: TokenLogprobs[] = [];

  add(frame: DeltaFrame, logprobs: readonly TokenLogprobs[]): void {
    this.texts.push(frame.text);
    for (const tokenId of frame.tokenIds) this.tokenIds.push(tokenId);
    for (const each of logprobs) this.logprobs.push(each);
  }

  choice(index: number, finishReason: FinishReason): Choice {
    return { index, finishReason, text: this.texts.join(""), tokenIds: [...this.tokenIds], logprobs: [...this.logprobs] };
  }
}

/**
 * What has arrived for one request, and how it ended.
 *
 * `outcome` is set once: a `Result`, or the error to throw. After a cancel it is set within `CANCEL_GRACE_MS`, whatever the server
 * does, so that whoever waits for the end never hangs.
 */
export class Exchange {
  admitted: Admitted | undefined;
  outcome: Result | WeirError | undefined;
  /** The server has said anything at all about this request. */
  begun = false;
  cancelled = false;
  /** The caller's timeout passed. */
  expired = false;
  /** The last `seq` that arrived. */
  seq = 0;
  /** Asked when the stream breaks under a request that has begun: true if somebody continues it elsewhere. */
  onBroken: (cause: WeirError) => boolean = () => false;

  private events: Event[] = [];
  private readonly outputs: Output[] = [new Output()];
  private usage: Usage | undefined;
  private cost: Money | undefined;
  private timings: Timings | undefined;
  private carrier: Carrier | undefined;
  private readonly timers: NodeJS.Timeout[] = [];
  private waiters: (() => void)[] = [];

  constructor(
    readonly requestId: string,
    readonly model: string,
  ) {}

  /** Binds it to the stream that it runs on. */
  ride(carrier: Carrier): void {
    this.carrier = carrier;
  }

  /** Ends it as late when so much time is over. */
  expireIn(milliseconds: number): void {
    const expire = (): void => {
      this.expired = true;
      this.cancel();
    };
    this.timers.push(setTimeout(expire, Math.min(milliseconds, 2 ** 31 - 1)));
  }

  /** Whether any output has arrived. */
  get delivered(): boolean {
    return this.seq > 0;
  }

  /** All events that nobody has taken yet. */
  take(): Event[] {
    const taken = this.events;
    this.events = [];
    return taken;
  }

  /** Resolves when there is an event to take or the outcome is known. */
  async wait(): Promise<void> {
    while (this.events.length === 0 && this.outcome === undefined) await this.change();
  }

  /** Resolves when the outcome is known. */
  async waitEnded(): Promise<void> {
    while (this.outcome === undefined) await this.change();
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
    this.begun = true;
    switch (frame.kind.case) {
      case "delta":
        this.receiveDelta(frame.kind.value);
        break;
      case "admitted":
        this.admitted = wire.admitted(frame.kind.value);
        this.push(this.admitted);
        break;
      case "progress":
        this.push(wire.progress(frame.kind.value));
        break;
      case "usage":
        this.usage = wire.usage(frame.kind.value.usage);
        this.cost = wire.money(frame.kind.value.cost);
        this.push({ type: "usage", usage: this.usage, cost: this.cost });
        break;
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

  /** The stream ended. A request that had begun is incomplete, unless it is continued; one that had not failed as the stream did. */
  breakOff(cause: WeirError): void {
    if (this.outcome !== undefined) return;
    this.carrier = undefined;
    if (!this.begun) this.end(copyError(cause, this.requestId));
    else if (this.cancelled || !this.onBroken(cause)) this.endIncomplete(cause);
  }

  /** Nobody could continue it. */
  endIncomplete(cause: WeirError): void {
    this.end(this.incomplete(`the stream ended before the request did: ${cause.plainMessage}`, cause));
  }

  /** What is known so far. */
  partial(): Partial {
    const { text, tokenIds } = this.output(0).choice(0, "UNSPECIFIED");
    const { requestId, model, usage, cost, timings, admitted } = this;
    return { requestId, model, text, tokenIds, usage, cost, timings, admitted };
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
    const delta = wire.delta(frame);
    if (delta.seq <= this.seq) return; // a repetition: already counted
    if (delta.seq !== this.seq + 1) {
      this.cancel();
      this.end(this.incomplete(`output is missing between frame ${this.seq} and frame ${delta.seq}`));
      return;
    }
    this.seq = delta.seq;
    this.output(delta.choiceIndex).add(frame, delta.logprobs);
    this.push(delta);
  }

  private output(choiceIndex: number): Output {
    if (choiceIndex < 0 || choiceIndex >= CHOICES_MAX) throw new RangeError(`choice ${choiceIndex} cannot be`);
    while (this.outputs.length <= choiceIndex) this.outputs.push(new Output());
    return this.outputs[choiceIndex]!;
  }

  private receiveFinished(frame: FinishedFrame): void {
    this.usage = wire.usage(frame.usage);
    this.cost = wire.money(frame.cost);
    this.timings = frame.timings && wire.timings(frame.timings);
    const reason = wire.finishReason(frame.reason);
    if (reason === "DEADLINE" || (this.expired && reason === "CANCELLED")) {
      this.end(this.deadlineError());
      return;
    }
    const ends = frame.choices.length > 0 ? frame.choices : [{ choiceIndex: 0, reason: frame.reason }];
    const choices = ends
      .map((end) => this.output(end.choiceIndex).choice(end.choiceIndex, wire.finishReason(end.reason)))
      .sort((one, other) => one.index - other.index);
    const first = choices[0]!;
    this.end({
      requestId: this.requestId,
      model: this.model,
      finishReason: reason,
      text: first.text,
      tokenIds: first.tokenIds,
      logprobs: first.logprobs,
      choices,
      usage: this.usage,
      cost: this.cost,
      timings: this.timings ?? NO_TIMINGS,
      admitted: this.admitted,
      exhaustedQuotas: frame.exhaustedQuotas.map(wire.quota),
      receiptCount: frame.receipts.length,
    });
  }

  private receiveFailed(frame: FailedFrame): void {
    if (frame.usage) {
      this.usage = wire.usage(frame.usage);
      this.cost = wire.money(frame.cost);
    }
    const status = frame.status ?? { $typeName: "google.rpc.Status", code: 13, message: "the server gave no reason", details: [] };
    const error = errorFromStatus(status, this.requestId, this.partial());
    this.end(this.expired && error instanceof Cancelled ? this.deadlineError() : error);
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
    const text = `cancelled, but the server did not confirm it within ${CANCEL_GRACE_MS} ms`;
    this.end(this.expired ? this.deadlineError() : this.incomplete(text));
  }

  private deadlineError(): DeadlineExceeded {
    const text = "the request was not done in the time given and was cancelled";
    return new DeadlineExceeded(text, { requestId: this.requestId, partial: this.partial() });
  }

  private incomplete(message: string, cause?: WeirError): IncompleteGeneration {
    const { requestId } = this;
    return new IncompleteGeneration(message, { code: cause?.code, reason: "INCOMPLETE", requestId, partial: this.partial(), cause });
  }

  private end(outcome: Result | WeirError): void {
    if (this.outcome !== undefined) return;
    this.outcome = outcome;
    for (const timer of this.timers) clearTimeout(timer);
    this.carrier?.release(this);
    this.changed();
  }
}

const NO_TIMINGS: Timings = {
  authMs: 0,
  tokenizeMs: 0,
  admissionMs: 0,
  queueMs: 0,
  coldStartMs: 0,
  prefillMs: 0,
  decodeMs: 0,
  clientStallMs: 0,
  settleMs: 0,
  ttftMs: 0,
  totalMs: 0,
};
