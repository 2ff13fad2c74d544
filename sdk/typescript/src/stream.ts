/**
 * The bidirectional stream that all requests of a client share.
 *
 * Reuse saves time: a request on an open stream costs about a fifth of a new RPC. Frames written at
 * the same moment leave in one message. When the stream breaks, the next request opens another.
 */

import { create, toBinary } from "@bufbuild/protobuf";
import { type ServiceError, status } from "@grpc/grpc-js";
import type { Attempt, Carrier } from "./attempt.js";
import type { Connection, GenerateCall } from "./connection.js";
import {
  Aborted,
  Cancelled,
  CLOSED,
  Internal,
  ResourceExhausted,
  Unavailable,
  type WeirError,
} from "./errors.js";
import {
  type ClientFrame,
  ClientFrameSchema,
  type GenerateResponse,
  GenerateRequestSchema,
} from "./gen/weir/v1/inference_service_pb.js";
import { closingController } from "./pause.js";
import { errorFromRpc } from "./status.js";

const BATCH_BYTES = 1024 * 1024; // of frames in one message; a larger frame is sent alone
const BATCH_FRAMES = 500; // of one message, far below a server's limit
const IN_FLIGHT_MAX = 1000; // concurrent requests per client, a server's limit per stream
const CLOSE_TIMEOUT_MS = 1000; // after the last request, the server only has to answer a half-close
/** This client's reason for ending a stream; another one would fail in the same way. */
export const UNREADABLE = "UNREADABLE";
const DRAINING = "DRAINING"; // the server's reason for refusing new requests

/** Opens calls, and waits until one can be made. */
export type Opener = Pick<Connection, "connected" | "openGenerate" | "key">;

/**
 * One open `Generate` call and its requests.
 *
 * `accepting` until it ends or the server starts to drain: its requests finish, and new ones use
 * another stream, which a load balancer routes to another server. So it is when the key of the
 * stream is refused, if another one can be had.
 */
class StreamConnection implements Carrier {
  accepting = true;
  readonly attempts = new Map<string, Attempt>();
  readonly ended: Promise<void>;

  private open = true;
  private outgoing: ClientFrame[] = [];
  private flushIsDue = false;
  private closing = false;
  private usedKey = "";
  private resolveEnded: () => void = () => {};

  private call: GenerateCall | undefined; // undefined until a server is connected

  constructor(
    private readonly opener: Opener,
    private readonly tried: string,
  ) {
    this.ended = new Promise((resolve) => {
      this.resolveEnded = resolve;
    });
    const connected = opener.connected();
    if (connected === undefined) this.openCall();
    else
      connected.then(
        () => this.openCall(),
        (error: WeirError) => this.end(error),
      );
  }

  /**
   * Begins or continues a request. Throws Aborted if one with this id runs here, ResourceExhausted
   * beyond `IN_FLIGHT_MAX`.
   */
  start(attempt: Attempt, frame: ClientFrame): void {
    const { requestId } = attempt;
    if (this.attempts.has(requestId)) {
      throw new Aborted("a request with this id is running on this client", {
        reason: "REQUEST_IN_FLIGHT",
        requestId,
      });
    }
    if (this.attempts.size >= IN_FLIGHT_MAX) {
      throw new ResourceExhausted(`${IN_FLIGHT_MAX} requests are running on this client`, {
        requestId,
      });
    }
    this.attempts.set(requestId, attempt);
    const start = frame.kind.case === "start" ? frame.kind.value : undefined;
    attempt.ride(this, Number(start?.initialCreditTokens ?? 0));
    this.send(frame);
  }

  sendCancel(attempt: Attempt): void {
    if (!this.open || this.attempts.get(attempt.requestId) !== attempt) return;
    this.send(
      create(ClientFrameSchema, {
        requestId: attempt.requestId,
        kind: { case: "cancel", value: {} },
      }),
    );
  }

  sendUpdate(frame: ClientFrame): void {
    this.send(frame);
  }

  sendCredit({ requestId }: Attempt, tokenCount: number): void {
    if (!this.open || !this.attempts.has(requestId)) return;
    this.send(
      create(ClientFrameSchema, {
        requestId,
        kind: { case: "credit", value: { tokenCount: BigInt(tokenCount) } },
      }),
    );
  }

  release(attempt: Attempt): void {
    if (this.attempts.get(attempt.requestId) !== attempt) return;
    this.attempts.delete(attempt.requestId);
    this.endWhenDone();
  }

  /** Half-closes the call as soon as the requests on this stream have ended. */
  halfClose(): void {
    this.closing = true;
    this.endWhenDone();
  }

  /** Ends the call at once. */
  abandon(): void {
    if (this.call) this.call.cancel();
    else this.end(new Cancelled(CLOSED));
  }

  private openCall(): void {
    if (!this.open) return;
    const call = (this.call = this.opener.openGenerate());
    this.usedKey = this.opener.key.text;
    call.on("data", (message: GenerateResponse) => this.read(message));
    call.on("error", (error: ServiceError) => this.end(errorFromRpc(error, false, "", this.tried)));
    call.on("end", () => this.end(new Unavailable("the server ended the stream")));
    this.flush();
  }

  private send(frame: ClientFrame): void {
    this.outgoing.push(frame);
    if (this.flushIsDue) return;
    this.flushIsDue = true;
    setImmediate(() => this.flush()); // batches all frames of this moment
  }

  private flush(): void {
    this.flushIsDue = false;
    if (this.open && this.call === undefined) return;
    let batch: ClientFrame[] = [];
    let size = 0;
    for (const frame of this.outgoing) {
      const bytes = toBinary(ClientFrameSchema, frame).length;
      if (batch.length === BATCH_FRAMES || (batch.length > 0 && size + bytes > BATCH_BYTES)) {
        this.write(batch);
        [batch, size] = [[], 0];
      }
      batch.push(frame);
      size += bytes;
    }
    this.outgoing = [];
    if (batch.length > 0) this.write(batch);
    this.endWhenDone();
  }

  private write(frames: ClientFrame[]): void {
    if (this.open) this.call?.write(create(GenerateRequestSchema, { frames }));
  }

  private endWhenDone(): void {
    // A cancel may follow while requests run.
    if (this.closing && this.open && this.attempts.size === 0 && this.outgoing.length === 0)
      this.call?.end();
  }

  private read(message: GenerateResponse): void {
    try {
      for (const frame of message.frames) {
        const attempt = this.attempts.get(frame.requestId);
        if (attempt === undefined) continue; // frames of abandoned requests are ignored
        attempt.receive(frame);
        if (frame.kind.case !== "failed") continue;
        const isKeyRefused =
          frame.kind.value.status?.code === status.UNAUTHENTICATED &&
          this.opener.key.refused(this.usedKey);
        if (isKeyRefused || attempt.refusal === DRAINING) {
          this.accepting = false;
          this.halfClose();
        }
      }
    } catch (error) {
      // An unreadable message ends its requests, not the client.
      this.call?.cancel();
      this.end(
        new Internal(`the server's answer could not be read: ${String(error)}`, {
          reason: UNREADABLE,
          cause: error,
        }),
      );
    }
  }

  private end(cause: WeirError): void {
    if (!this.open) return;
    if (this.opener.key.renews(cause)) this.opener.key.refused(this.usedKey);
    // Before requests are ended, so that a retry opens a new stream.
    this.open = this.accepting = false;
    const left = [...this.attempts.values()];
    this.attempts.clear();
    for (const attempt of left) attempt.breakOff(cause);
    this.resolveEnded();
  }
}

/** Opens a stream on first use, and another after it ended or its server began to drain. */
export class SharedStream {
  /** Longest keep time of the servers, if known. */
  keepMaxMs = Infinity;
  private current: StreamConnection | undefined;
  private readonly running = new Set<StreamConnection>();
  private readonly suspended = new Set<Attempt>();
  private readonly closing = closingController();
  private ended = false; // opens no new streams

  /** `tried`: address of the server, for messages. */
  constructor(
    private readonly opener: Opener,
    private readonly tried: string,
  ) {}

  /** Aborted when new requests are refused. */
  get closed(): AbortSignal {
    return this.closing.signal;
  }

  /**
   * Begins a request on the open stream, or on a new one. Throws a WeirError if the client refuses
   * it.
   */
  start(attempt: Attempt, frame: ClientFrame): void {
    this.checkOpen(attempt.requestId);
    this.resume(attempt, frame);
  }

  /** Throws Cancelled if new requests are refused. */
  checkOpen(requestId: string): void {
    if (this.closed.aborted) throw new Cancelled(CLOSED, { requestId });
  }

  /**
   * Continues a request, even while the client closes, to deliver its cancel. Throws a WeirError.
   */
  resume(attempt: Attempt, frame: ClientFrame): void {
    if (this.ended) throw new Cancelled(CLOSED, { requestId: attempt.requestId });
    if (this.current === undefined || !this.current.accepting) {
      const opened = new StreamConnection(this.opener, this.tried);
      this.current = opened;
      this.running.add(opened);
      void opened.ended.then(() => this.running.delete(opened));
    }
    this.current.start(attempt, frame);
  }

  /** Returns whether the next stream has another key after this error. */
  renews(error: WeirError): boolean {
    return this.opener.key.renews(error);
  }

  /** Tracks a request without a stream, until `forget`. */
  suspend(attempt: Attempt): void {
    this.suspended.add(attempt);
  }

  /** Stops tracking a request. */
  forget(attempt: Attempt): void {
    this.suspended.delete(attempt);
  }

  /** Cancels all requests, waits a bounded time for their final frames, and ends the streams. */
  async close(): Promise<void> {
    this.closing.abort();
    const attempts = [
      ...[...this.running].flatMap((connection) => [...connection.attempts.values()]),
      ...this.suspended,
    ];
    for (const attempt of attempts) attempt.cancel();
    // Bounded: each gives up after its grace period.
    for (const attempt of attempts) await attempt.waitEnded();
    this.ended = true;
    const connections = [...this.running];
    for (const connection of connections) connection.halfClose();
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, CLOSE_TIMEOUT_MS);
    });
    await Promise.race([Promise.all(connections.map((connection) => connection.ended)), late]);
    clearTimeout(timer);
    for (const connection of this.running) connection.abandon();
  }
}
