/**
 * One request as its caller sees it: iterate it, cancel it, await its result.
 *
 * Refusals before the first token are retried; later breaks of the stream are resumed
 * (`resumption`).
 */

import { clone, create } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { Attempt, EVERYTHING, Prefetch } from "./attempt.js";
import type { RetryPolicy } from "./connection.js";
import {
  Aborted,
  AlreadyExists,
  Cancelled,
  FailedPrecondition,
  NotFound,
  WeirError,
} from "./errors.js";
import { type ClientFrame, ClientFrameSchema } from "./gen/weir/v1/inference_service_pb.js";
import { pause } from "./pause.js";
import { OUTPUT_GONE, REQUEST_IN_FLIGHT, REQUEST_SETTLED, Resumption } from "./resumption.js";
import type { LimitOptions } from "./options.js";
import { buildUpdate, checkEncodable } from "./prompt.js";
import type { SharedStream } from "./stream.js";
import type { Admitted, Delta, Event, Limits, Partial, Result } from "./values.js";

const KEEP_FIELD = "keepOnDisconnectMs"; // as `typedError` names it

/**
 * State that outlives an unreferenced generation: its attempt, and the release of the caller's
 * signal.
 */
interface Held {
  attempt: Attempt | undefined;
  detach(): void;
}

const abandoned = new FinalizationRegistry((held: Held) => {
  held.attempt?.cancel();
  held.detach();
});

/** Terms of one generation. */
export interface GenerationTerms {
  readonly timeoutMs: number | undefined;
  readonly retry: RetryPolicy;
  readonly signal: AbortSignal | undefined;
  /**
   * Milliseconds to resume a broken stream, for which the server keeps the request. 0: not at all.
   */
  readonly keepMs: number;
  /** Explicit wish of the caller: a refusal is not retried without it. */
  readonly keepIsAsked: boolean;
  /** Limit of unread output; undefined: unlimited. */
  readonly prefetchTokens: number | undefined;
}

/**
 * A streamed answer, made by `WeirClient.generate`. Nothing is sent before the first use.
 *
 * `for await (const delta of generation)` yields the output; leaving the loop early cancels the
 * request. `await generation.result()` returns the whole answer with usage and cost. `await using`
 * cancels a running request at the end of the block.
 */
export class Generation implements AsyncIterable<Delta>, AsyncDisposable {
  readonly requestId: string;
  readonly model: string;

  private readonly held: Held = { attempt: undefined, detach: () => {} };
  private retryCount = 0;
  private isRenewed = false; // the key, after the server has refused one
  private deadline: number | undefined;
  private failure: WeirError | undefined; // of the previous attempt
  private error: WeirError | undefined; // the final one
  private readonly cancelling = new AbortController();
  private unread: Event[] = []; // the next one is last
  private refilling: Promise<boolean> | undefined; // shared by concurrent readers

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

  /** Number of times the request moved to another stream. */
  get resumeCount(): number {
    return this.attempt?.resumeCount ?? 0;
  }

  /**
   * The admission, with input tokens and every quota with its remainder. Undefined before it
   * arrives.
   */
  get admitted(): Admitted | undefined {
    return this.attempt?.admitted;
  }

  /** Output received so far, whether or not the request has ended. */
  get partial(): Partial {
    const outcome = this.attempt?.outcome;
    if (isResult(outcome)) return outcome; // with the bill
    return (this.attempt ?? new Attempt(this.requestId, this.model)).partial();
  }

  /** True if the request has ended, with any outcome. */
  get done(): boolean {
    return this.error !== undefined || isResult(this.attempt?.outcome);
  }

  /**
   * Sends the request unless it was sent; `timeoutMs` begins here. Throws a WeirError if it cannot
   * be sent.
   */
  start(): this {
    if (this.attempt !== undefined || this.error !== undefined) return this;
    if (this.terms.timeoutMs !== undefined)
      this.deadline = performance.now() + this.terms.timeoutMs;
    const { signal } = this.terms;
    if (signal?.aborted) {
      this.fail(new Cancelled("aborted before it was sent", { requestId: this.requestId }));
      throw signal.reason;
    }
    this.beginAttempt();
    if (signal) this.attachTo(signal);
    return this;
  }

  /**
   * Asks the server to stop, without waiting. Iteration ends after the output delivered until then.
   */
  cancel(): void {
    this.cancelling.abort();
    this.attempt?.cancel();
  }

  /**
   * Changes the limits of the running request; resolves to the new ones.
   *
   * @throws InvalidRequest for invalid limits, FailedPrecondition before its admission and after
   * its end, Unavailable if no answer came.
   */
  async update(limits: LimitOptions): Promise<Limits> {
    const { requestId, attempt } = this;
    if (attempt === undefined)
      throw new FailedPrecondition("the request was not sent yet", {
        reason: "NOT_ADMITTED",
        requestId,
      });
    const frame = create(ClientFrameSchema, {
      requestId,
      kind: { case: "update", value: buildUpdate(limits) },
    });
    checkEncodable(frame, "update");
    return await attempt.update(frame);
  }

  /**
   * Cancels the request if it runs and waits for its end (at most 2 s). Never throws a WeirError.
   */
  async close(): Promise<void> {
    if (this.attempt === undefined || this.error !== undefined || isResult(this.attempt.outcome))
      return;
    this.cancel();
    await this.attempt.waitEnded();
    if (this.attempt.outcome instanceof WeirError) this.fail(this.attempt.outcome);
  }

  /**
   * Waits for the end and returns the whole answer with finish reason, usage and cost; after a
   * cancel, the delivered part.
   *
   * @throws WeirError that the request ended with; the reason of an aborted `signal`, by default
   * an `AbortError`: `partial` then has the delivered part with its usage and cost.
   */
  async result(): Promise<Result> {
    while ((await this.next()) !== undefined);
    const outcome = this.attempt?.outcome;
    // `take` returns nothing only after the end.
    if (!isResult(outcome)) throw new Error("the generation has no outcome");
    return outcome;
  }

  /**
   * Yields every event: `Admitted`, `Progress`, `Delta`, `UsageUpdate`, `Resumed`. Leaving the loop
   * early cancels the request.
   */
  events(): AsyncGenerator<Event, void, void> {
    return this.cancelledByReturn(this.readEvents());
  }

  /**
   * Yields the deltas. Leaving the loop early (`break`, an exception in its body) cancels the
   * request.
   */
  [Symbol.asyncIterator](): AsyncGenerator<Delta, void, void> {
    return this.cancelledByReturn(this.readDeltas());
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /**
   * Cancels before a generator's `return`, which would wait for a pending `next` and its output.
   */
  private cancelledByReturn<Item>(
    generator: AsyncGenerator<Item, void, void>,
  ): AsyncGenerator<Item, void, void> {
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
      for (let event = await this.next(); event !== undefined; event = await this.next())
        yield event;
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

  /** Returns the next event; of concurrent readers, each event goes to one. */
  private async next(): Promise<Event | undefined> {
    while (this.unread.length === 0) {
      this.refilling ??= this.refill().finally(() => (this.refilling = undefined));
      if (!(await this.refilling)) break;
    }
    const event = this.unread.pop();
    if (event?.type === "delta") this.attempt?.read(event.tokenIds.length);
    return event;
  }

  /** Returns whether there is an event to read before the end. */
  private async refill(): Promise<boolean> {
    this.unread = (await this.take()).reverse();
    return this.unread.length > 0;
  }

  /**
   * Lets a signal cancel the request until its end, without a reference from a longer-lived signal.
   */
  private attachTo(signal: AbortSignal): void {
    const { held, cancelling } = this;
    const abort = (): void => {
      cancelling.abort();
      held.attempt?.cancel();
    };
    signal.addEventListener("abort", abort, { once: true });
    held.detach = () => signal.removeEventListener("abort", abort);
  }

  private detachAtEnd(): void {
    const { held } = this;
    const attempt = held.attempt;
    void attempt?.waitEnded().then(() => {
      if (isResult(attempt.outcome)) held.detach();
    });
  }

  /** Returns all pending events, at least one; none at the end of the request. */
  private async take(): Promise<Event[]> {
    this.start();
    for (;;) {
      if (this.error !== undefined) throw this.asAborted(this.error);
      const attempt = this.attempt!;
      await attempt.wait();
      const events = attempt.take();
      if (events.length > 0) return events;
      if (isResult(attempt.outcome)) {
        const { signal } = this.terms;
        if (signal?.aborted && attempt.outcome.finishReason === "CANCELLED") throw signal.reason;
        return events;
      }
      await this.retryOrThrow(attempt.outcome as WeirError);
    }
  }

  private get attempt(): Attempt | undefined {
    return this.held.attempt;
  }

  private beginAttempt(): void {
    const { frame, stream, terms } = this;
    const attach = frame.kind.case === "attach" ? frame.kind.value : undefined;
    // The server needs credit if the request was started with `prefetchTokens`.
    const limit = terms.prefetchTokens ?? (attach && EVERYTHING);
    const prefetch = limit === undefined ? undefined : new Prefetch(limit);
    const attempt = new Attempt(
      this.requestId,
      this.model,
      Number(attach?.afterSeq ?? 0),
      prefetch,
    );
    this.held.attempt = attempt;
    try {
      const resumption =
        terms.keepMs > 0 ? new Resumption(stream, attempt, frame, terms.keepMs) : undefined;
      if (attach && resumption) resumption.begin();
      else stream.start(attempt, frame);
      if (this.deadline !== undefined)
        attempt.expireIn(Math.max(0, this.deadline - performance.now()), this.terms.timeoutMs);
      if (terms.signal) this.detachAtEnd();
    } catch (error) {
      if (!(error instanceof WeirError)) throw error;
      attempt.fail(error); // nothing else will end it
      throw this.fail(error);
    }
  }

  /**
   * Begins the next attempt after its wait, or ends the request with `error` and throws it.
   *
   * Only before the first token, with the same request id. A refused request left no trace; one
   * that the server did accept is attached to, or answered with ALREADY_EXISTS, ABORTED or
   * OUTPUT_GONE, and never run and billed twice. If a retry gets such an answer, it concerns our
   * own first attempt: its output is fetched if the server kept it, otherwise the error of that
   * attempt is thrown.
   */
  private async retryOrThrow(error: WeirError): Promise<void> {
    if (this.canBeAskedDifferently(error)) {
      this.beginAttempt();
      return;
    }
    if (!this.isRenewed && this.stream.renews(error) && this.mayRepeat(error)) {
      this.isRenewed = true;
      this.beginAttempt();
      return;
    }
    const waitMs = this.retryWaitMs(error);
    if (waitMs === undefined) {
      const about =
        [AlreadyExists, Aborted, NotFound].some((kind) => error instanceof kind) ||
        error.reason === OUTPUT_GONE;
      throw this.fail(about && this.failure !== undefined ? this.failure : error);
    }
    this.failure = error;
    this.retryCount += 1;
    if (!(await pause(waitMs, [this.cancelling.signal, this.stream.closed]))) {
      const why = this.stream.closed.aborted ? "the client was closed" : "cancelled";
      throw this.asAborted(
        this.fail(
          new Cancelled(`${why} while waiting to try again`, { requestId: this.requestId }),
        ),
      );
    }
    this.beginAttempt();
  }

  /** Changes the frame as the server's refusal suggests; once per kind of change. */
  private canBeAskedDifferently(error: WeirError): boolean {
    const { requestId, frame, terms } = this;
    if (this.cancelling.signal.aborted || frame.kind.case !== "start" || terms.keepMs === 0)
      return false;
    if (
      this.failure !== undefined &&
      (error.reason === REQUEST_SETTLED || error.reason === REQUEST_IN_FLIGHT)
    ) {
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
    if (!this.mayRepeat(error)) return undefined;
    const waitMs = this.terms.retry.waitMs(error, this.retryCount);
    if (
      waitMs === undefined ||
      (this.deadline !== undefined && performance.now() + waitMs >= this.deadline)
    )
      return undefined;
    return waitMs;
  }

  /** Returns whether nothing of the request was delivered, billed or cancelled. */
  private mayRepeat(error: WeirError): boolean {
    const billed = error.partial?.usage !== undefined;
    return !(this.cancelling.signal.aborted || this.attempt!.delivered || billed);
  }

  /** Returns the reason of the signal if that cancelled the request, as `fetch` throws it. */
  private asAborted(error: WeirError): unknown {
    const { signal } = this.terms;
    return signal?.aborted && error instanceof Cancelled ? signal.reason : error;
  }

  private fail(error: WeirError): WeirError {
    this.error = error;
    this.held.detach();
    return error;
  }
}

/** Sets how long the request outlives its connection; 0: not at all. */
export function setKeep({ kind }: ClientFrame, keepMs: number): void {
  if (kind.case !== "start") return;
  if (keepMs > 0) kind.value.keepOnDisconnect = durationFromMs(Math.ceil(keepMs));
  else delete kind.value.keepOnDisconnect;
}

/** Returns the operator's limit of the keep time from a refusal; 0: not allowed or unknown. */
function keepAllowedMs(refusal: WeirError, refusedMs: number): number {
  const allowedMs = Math.floor(Number(refusal.metadata["keep_on_disconnect_max_s"] ?? 0) * 1000);
  return allowedMs > 0 && allowedMs < refusedMs ? allowedMs : 0;
}

function isResult(outcome: Result | WeirError | undefined): outcome is Result {
  return outcome !== undefined && !(outcome instanceof WeirError);
}
