/**
 * One request as its caller sees it: iterate it, cancel it, await its result.
 *
 * Retries what was refused before the first token; what breaks later goes on by itself (`resumption`).
 */

import { clone, create } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import type { RetryPolicy } from "./connection.js";
import { Aborted, AlreadyExists, Cancelled, FailedPrecondition, NotFound, WeirError } from "./errors.js";
import { Exchange } from "./exchange.js";
import { type ClientFrame, ClientFrameSchema } from "./gen/weir/v1/inference_service_pb.js";
import { pause } from "./pause.js";
import { EVERYTHING, Prefetch } from "./prefetch.js";
import { OUTPUT_GONE, REQUEST_IN_FLIGHT, REQUEST_SETTLED, Resumption } from "./resumption.js";
import type { LimitOptions } from "./options.js";
import { buildUpdate, checkEncodable } from "./prompt.js";
import type { SharedStream } from "./stream.js";
import type { Admitted, Delta, Event, Limits, Partial, Result } from "./values.js";

const KEEP_FIELD = "keep_on_disconnect";

/** What outlives a generation that nobody holds any more: its exchange of the moment, and how to let go of the caller's signal. */
interface Held {
  exchange: Exchange | undefined;
  detach(): void;
}

const abandoned = new FinalizationRegistry((held: Held) => {
  held.exchange?.cancel();
  held.detach();
});

/** How one generation is to be run. */
export interface GenerationTerms {
  readonly timeoutMs: number | undefined;
  readonly retry: RetryPolicy;
  readonly signal: AbortSignal | undefined;
  /** How long a broken stream may be looked for again; the server keeps the request so long. 0: not at all. */
  readonly keepMs: number;
  /** The caller's own wish: a server that refuses it is not asked again without. */
  readonly keepIsAsked: boolean;
  /** Output that may be unread; undefined: what comes. */
  readonly prefetchTokens: number | undefined;
}

/**
 * A streamed answer. Made by `WeirClient.generate`; nothing is sent before it is iterated or waited for.
 *
 * `for await (const delta of generation)` gives the output; leaving the loop early cancels the request. `await generation.result()`
 * gives the whole answer with usage and cost. `await using` cancels what still runs at the end of the block.
 */
export class Generation implements AsyncIterable<Delta>, AsyncDisposable {
  readonly requestId: string;
  readonly model: string;

  private readonly held: Held = { exchange: undefined, detach: () => {} };
  private attempt = 0;
  private deadline: number | undefined;
  private failure: WeirError | undefined; // of the attempt before the running one
  private error: WeirError | undefined; // the final one
  private readonly cancelling = new AbortController();
  private unread: Event[] = []; // the next one stands last
  private refilling: Promise<boolean> | undefined; // for all who read at once

  constructor(
    private readonly stream: SharedStream,
    private frame: ClientFrame,
    model: string,
    private terms: GenerationTerms,
  ) {
    abandoned.register(this, this.held);
    this.requestId = frame.requestId;
    this.model = model;
  }

  /** How often its stream broke and it went on, on another one. */
  get resumeCount(): number {
    return this.exchange?.resumeCount ?? 0;
  }

  /** What admission told: input tokens, and every quota with what is left of it. Undefined until it comes. */
  get admitted(): Admitted | undefined {
    return this.exchange?.admitted;
  }

  /** What has arrived so far, whether or not the request has ended. */
  get partial(): Partial {
    return (this.exchange ?? new Exchange(this.requestId, this.model)).partial();
  }

  /** Whether the request has ended, one way or another. */
  get done(): boolean {
    return this.error !== undefined || isResult(this.exchange?.outcome);
  }

  /** Sends the request if that was not done yet; the time of `timeoutMs` begins here. Throws a WeirError if it is not taken. */
  start(): this {
    if (this.exchange !== undefined || this.error !== undefined) return this;
    if (this.terms.timeoutMs !== undefined) this.deadline = performance.now() + this.terms.timeoutMs;
    const { signal } = this.terms;
    if (signal?.aborted) throw this.fail(new Cancelled("aborted before it was sent", { requestId: this.requestId, cause: signal.reason }));
    this.beginAttempt();
    if (signal) this.attachTo(signal);
    return this;
  }

  /** Asks the server to stop, without waiting. Iteration then ends after what was delivered meanwhile. */
  cancel(): void {
    this.cancelling.abort();
    this.exchange?.cancel();
  }

  /**
   * Lowers or raises the limits of the request while it runs; resolves to those that hold from then on.
   *
   * @throws InvalidRequest for limits that cannot be, FailedPrecondition before its admission and after its end, Unavailable if no
   * answer came.
   */
  async update(limits: LimitOptions): Promise<Limits> {
    const { requestId, exchange } = this;
    if (exchange === undefined) throw new FailedPrecondition("the request was not sent yet", { reason: "NOT_ADMITTED", requestId });
    const frame = create(ClientFrameSchema, { requestId, kind: { case: "update", value: buildUpdate(limits) } });
    checkEncodable(frame, "update");
    return await exchange.update(frame);
  }

  /** Cancels the request if it runs, and waits until its end is known (at most 2 s). Never throws a WeirError. */
  async close(): Promise<void> {
    if (this.exchange === undefined || this.error !== undefined || isResult(this.exchange.outcome)) return;
    this.cancel();
    await this.exchange.waitEnded();
    if (this.exchange.outcome instanceof WeirError) this.fail(this.exchange.outcome);
  }

  /**
   * The whole answer with finish reason, usage and cost; after a cancel, what was delivered until then. Waits for the end.
   *
   * @throws WeirError that the request ended with.
   */
  async result(): Promise<Result> {
    while ((await this.next()) !== undefined);
    const outcome = this.exchange?.outcome;
    if (!isResult(outcome)) throw new Error("the generation has no outcome"); // `take` returns nothing only after the end
    return outcome;
  }

  /** Everything as it comes: `Admitted`, `Progress`, `Delta`, `UsageUpdate`, `Resumed`. Leaving the loop early cancels the request. */
  events(): AsyncGenerator<Event, void, void> {
    return this.cancelledByReturn(this.readEvents());
  }

  /** The deltas. Leaving the loop early (`break`, an exception in its body) cancels the request. */
  [Symbol.asyncIterator](): AsyncGenerator<Delta, void, void> {
    return this.cancelledByReturn(this.readDeltas());
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** A generator's `return` waits for the `next` before it, which waits for output: so that goes first. */
  private cancelledByReturn<Item>(generator: AsyncGenerator<Item, void, void>): AsyncGenerator<Item, void, void> {
    const end = generator.return.bind(generator);
    generator.return = (value) => {
      if (!this.done) this.cancel();
      return end(value);
    };
    return generator;
  }

  private async *readEvents(): AsyncGenerator<Event, void, void> {
    let ended = false;
    try {
      for (let event = await this.next(); event !== undefined; event = await this.next()) yield event;
      ended = true;
    } finally {
      if (!ended) this.cancel();
    }
  }

  private async *readDeltas(): AsyncGenerator<Delta, void, void> {
    for await (const event of this.readEvents()) {
      if (event.type === "delta") yield event;
    }
  }

  /** Several may read at once: each event is one's. */
  private async next(): Promise<Event | undefined> {
    while (this.unread.length === 0) {
      this.refilling ??= this.refill().finally(() => (this.refilling = undefined));
      if (!(await this.refilling)) break;
    }
    const event = this.unread.pop();
    if (event?.type === "delta") this.exchange?.read(event.tokenIds.length);
    return event;
  }

  /** Whether there is something to read, and not the end. */
  private async refill(): Promise<boolean> {
    this.unread = (await this.take()).reverse();
    return this.unread.length > 0;
  }

  /** Lets a signal cancel it until its end; the signal may live for long after that, and does not hold it. */
  private attachTo(signal: AbortSignal): void {
    const { held, cancelling } = this;
    const abort = (): void => {
      cancelling.abort();
      held.exchange?.cancel();
    };
    signal.addEventListener("abort", abort, { once: true });
    held.detach = () => signal.removeEventListener("abort", abort);
  }

  private detachAtEnd(): void {
    const { held } = this;
    const exchange = held.exchange;
    void exchange?.waitEnded().then(() => {
      if (isResult(exchange.outcome)) held.detach();
    });
  }

  /** All events that have arrived, at least one; none at the end of the request. */
  private async take(): Promise<Event[]> {
    this.start();
    for (;;) {
      if (this.error !== undefined) throw this.error;
      const exchange = this.exchange!;
      await exchange.wait();
      const events = exchange.take();
      if (events.length > 0 || isResult(exchange.outcome)) return events;
      await this.retryOrThrow(exchange.outcome as WeirError);
    }
  }

  private get exchange(): Exchange | undefined {
    return this.held.exchange;
  }

  private beginAttempt(): void {
    const { frame, stream, terms } = this;
    const attach = frame.kind.case === "attach" ? frame.kind.value : undefined;
    // A request of somebody else may need credit, as whoever started it wanted.
    const limit = terms.prefetchTokens ?? (attach && EVERYTHING);
    const prefetch = limit === undefined ? undefined : new Prefetch(limit);
    const exchange = new Exchange(this.requestId, this.model, Number(attach?.afterSeq ?? 0), prefetch);
    this.held.exchange = exchange;
    try {
      const resumption = terms.keepMs > 0 ? new Resumption(stream, exchange, frame, terms.keepMs) : undefined;
      if (attach && resumption) resumption.begin();
      else stream.start(exchange, frame);
      if (this.deadline !== undefined) exchange.expireIn(Math.max(0, this.deadline - performance.now()));
      if (terms.signal) this.detachAtEnd();
    } catch (error) {
      if (!(error instanceof WeirError)) throw error;
      exchange.fail(error); // nothing of it is waited for
      throw this.fail(error);
    }
  }

  /**
   * Begins the next attempt after the wait that is due, or makes `error` the end of the request and throws it.
   *
   * Only before the first token, and with the same request id: a refused request left no trace, and one that got in unseen is
   * received, or answered with ALREADY_EXISTS, ABORTED or OUTPUT_GONE, instead of being run and billed again. That answer to a
   * retry is about our own first attempt: its output is fetched where it is kept, else the failure of that attempt is thrown.
   */
  private async retryOrThrow(error: WeirError): Promise<void> {
    if (this.canBeAskedDifferently(error)) {
      this.beginAttempt();
      return;
    }
    const waitMs = this.retryWaitMs(error);
    if (waitMs === undefined) {
      const about = [AlreadyExists, Aborted, NotFound].some((kind) => error instanceof kind) || error.reason === OUTPUT_GONE;
      throw this.fail(about && this.failure !== undefined ? this.failure : error);
    }
    this.failure = error;
    this.attempt += 1;
    if (!(await pause(waitMs, [this.cancelling.signal, this.stream.closed]))) {
      const why = this.stream.closed.aborted ? "the client was closed" : "cancelled";
      throw this.fail(new Cancelled(`${why} while waiting to try again`, { requestId: this.requestId }));
    }
    this.beginAttempt();
  }

  /** Changes the frame to what the server's answer suggests; once each. */
  private canBeAskedDifferently(error: WeirError): boolean {
    const { requestId, frame, terms } = this;
    if (this.cancelling.signal.aborted || frame.kind.case !== "start" || terms.keepMs === 0) return false;
    if (this.failure !== undefined && (error.reason === REQUEST_SETTLED || error.reason === REQUEST_IN_FLIGHT)) {
      this.frame = create(ClientFrameSchema, { requestId, kind: { case: "attach", value: {} } });
      return true;
    }
    const fields = error.details.fieldViolations.map(({ field }) => field);
    if (terms.keepIsAsked || fields.length !== 1 || fields[0] !== KEEP_FIELD) return false;
    const keepMs = keepAllowedMs(error, terms.keepMs);
    this.stream.keepMaxMs = keepMs;
    this.frame = clone(ClientFrameSchema, frame);
    setKeep(this.frame, keepMs);
    this.terms = { ...terms, keepMs };
    return true;
  }

  private retryWaitMs(error: WeirError): number | undefined {
    const billed = error.partial?.usage !== undefined;
    if (this.cancelling.signal.aborted || this.exchange!.delivered || billed) return undefined;
    const waitMs = this.terms.retry.waitMs(error, this.attempt);
    if (waitMs === undefined || (this.deadline !== undefined && performance.now() + waitMs >= this.deadline)) return undefined;
    return waitMs;
  }

  private fail(error: WeirError): WeirError {
    this.error = error;
    this.held.detach();
    return error;
  }
}

/** Writes how long the request outlives its connection; 0: not at all. */
export function setKeep({ kind }: ClientFrame, keepMs: number): void {
  if (kind.case !== "start") return;
  if (keepMs > 0) kind.value.keepOnDisconnect = durationFromMs(Math.ceil(keepMs));
  else delete kind.value.keepOnDisconnect;
}

/** For how long the operator keeps requests, as the refusal of a longer time tells; 0: not at all, or nobody knows. */
function keepAllowedMs(refusal: WeirError, refusedMs: number): number {
  const allowedMs = Math.floor(Number(refusal.metadata["keep_max_s"] ?? 0) * 1000);
  return allowedMs > 0 && allowedMs < refusedMs ? allowedMs : 0;
}

function isResult(outcome: Result | WeirError | undefined): outcome is Result {
  return outcome !== undefined && !(outcome instanceof WeirError);
}
