/**
 * The one bidi stream that all requests of a client share.
 *
 * Reuse is what makes it worth having: a request on an open stream costs about a fifth of a new RPC. Frames that are written at the
 * same moment leave in one message. When the stream breaks, the next request opens a new one.
 */

import { create, toBinary } from "@bufbuild/protobuf";
import type { ServiceError } from "@grpc/grpc-js";
import type { Carrier } from "./carriers.js";
import type { GenerateCall } from "./connection.js";
import { Aborted, Cancelled, Internal, ResourceExhausted, Unavailable, type WeirError } from "./errors.js";
import type { Exchange } from "./exchange.js";
import { type ClientFrame, ClientFrameSchema, type GenerateResponse, GenerateRequestSchema } from "./gen/weir/v1/inference_service_pb.js";
import { closingController } from "./pause.js";
import { errorFromRpc } from "./status.js";

const BATCH_BYTES = 1024 * 1024; // frames are put into one message up to this; a larger frame travels alone
const BATCH_FRAMES = 500; // and up to so many, far below what a server takes in one message
const IN_FLIGHT_MAX = 1000; // requests at once per client: what a server lets run on one stream
const CLOSE_TIMEOUT_MS = 1000; // after the last request has ended, the server only has to answer a half-close
/** This client's reason for giving up a stream; another stream would say the same. */
export const UNREADABLE = "UNREADABLE";
const DRAINING = "DRAINING"; // the server's reason for taking no new requests

/**
 * One open `Generate` call and the requests on it.
 *
 * `accepting` until it ends or the server says that it drains: its requests finish, and the next ones belong on another stream,
 * which a load balancer leads to another server.
 */
class StreamConnection implements Carrier {
  accepting = true;
  readonly exchanges = new Map<string, Exchange>();
  readonly ended: Promise<void>;

  private open = true;
  private outgoing: ClientFrame[] = [];
  private flushIsDue = false;
  private closing = false;
  private resolveEnded: () => void = () => {};

  constructor(private readonly call: GenerateCall) {
    this.ended = new Promise((resolve) => {
      this.resolveEnded = resolve;
    });
    call.on("data", (message: GenerateResponse) => this.read(message));
    call.on("error", (error: ServiceError) => this.end(errorFromRpc(error, false)));
    call.on("end", () => this.end(new Unavailable("the server ended the stream")));
  }

  /** Begins a request, or continues one. Throws Aborted if one of that id runs here, ResourceExhausted beyond `IN_FLIGHT_MAX`. */
  start(exchange: Exchange, frame: ClientFrame): void {
    const { requestId } = exchange;
    if (this.exchanges.has(requestId)) {
      throw new Aborted("a request with this id is running on this client", { reason: "REQUEST_IN_FLIGHT", requestId });
    }
    if (this.exchanges.size >= IN_FLIGHT_MAX) {
      throw new ResourceExhausted(`${IN_FLIGHT_MAX} requests are running on this client`, { requestId });
    }
    this.exchanges.set(requestId, exchange);
    const start = frame.kind.case === "start" ? frame.kind.value : undefined;
    exchange.ride(this, Number(start?.initialCreditTokens ?? 0));
    this.send(frame);
  }

  sendCancel(exchange: Exchange): void {
    if (!this.open || this.exchanges.get(exchange.requestId) !== exchange) return;
    this.send(create(ClientFrameSchema, { requestId: exchange.requestId, kind: { case: "cancel", value: {} } }));
  }

  sendUpdate(frame: ClientFrame): void {
    this.send(frame);
  }

  sendCredit({ requestId }: Exchange, tokenCount: number): void {
    if (!this.open || !this.exchanges.has(requestId)) return;
    this.send(create(ClientFrameSchema, { requestId, kind: { case: "credit", value: { tokenCount: BigInt(tokenCount) } } }));
  }

  release(exchange: Exchange): void {
    if (this.exchanges.get(exchange.requestId) !== exchange) return;
    this.exchanges.delete(exchange.requestId);
    this.endWhenDone();
  }

  /** Tells the server that nothing more comes, as soon as the requests on this stream have ended. */
  halfClose(): void {
    this.closing = true;
    this.endWhenDone();
  }

  /** Ends the call at once. */
  abandon(): void {
    this.call.cancel();
  }

  private send(frame: ClientFrame): void {
    this.outgoing.push(frame);
    if (this.flushIsDue) return;
    this.flushIsDue = true;
    setImmediate(() => this.flush()); // whatever else is sent at this moment goes into the same message
  }

  private flush(): void {
    this.flushIsDue = false;
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
    if (this.open) this.call.write(create(GenerateRequestSchema, { frames }));
  }

  private endWhenDone(): void {
    // While requests run, a cancel may have to follow.
    if (this.closing && this.open && this.exchanges.size === 0 && this.outgoing.length === 0) this.call.end();
  }

  private read(message: GenerateResponse): void {
    try {
      for (const frame of message.frames) {
        const exchange = this.exchanges.get(frame.requestId);
        if (exchange === undefined) continue; // late news of a request that was given up here
        exchange.receive(frame);
        if (frame.kind.case === "failed" && exchange.refusal === DRAINING) {
          this.accepting = false;
          this.halfClose();
        }
      }
    } catch (error) {
      // An answer that this client cannot read: its requests end, the client lives on.
      this.call.cancel();
      this.end(new Internal(`the server's answer could not be read: ${String(error)}`, { reason: UNREADABLE, cause: error }));
    }
  }

  private end(cause: WeirError): void {
    if (!this.open) return;
    this.open = this.accepting = false; // before anybody is told, so that a retry opens a new stream
    const left = [...this.exchanges.values()];
    this.exchanges.clear();
    for (const exchange of left) exchange.breakOff(cause);
    this.resolveEnded();
  }
}

/** Opens the stream when it is first needed, and again after it ended or its server began to drain. */
export class SharedStream {
  /** For so long the servers keep requests, as far as they have said. */
  keepMaxMs = Infinity;
  private current: StreamConnection | undefined;
  private readonly running = new Set<StreamConnection>();
  private readonly suspended = new Set<Exchange>();
  private readonly closing = closingController();
  private ended = false; // opens no stream any more

  constructor(private readonly openCall: () => GenerateCall) {}

  /** Aborted when nothing new is taken any more. */
  get closed(): AbortSignal {
    return this.closing.signal;
  }

  /** Begins a request on the open stream, or on a new one. Throws a WeirError if the client will not take it. */
  start(exchange: Exchange, frame: ClientFrame): void {
    this.checkOpen(exchange.requestId);
    this.resume(exchange, frame);
  }

  /** Throws Cancelled if nothing new is taken. */
  checkOpen(requestId: string): void {
    if (this.closed.aborted) throw new Cancelled("the client is closed", { requestId });
  }

  /** Goes on with a request; while the client closes too, because what runs on must be told to stop. Throws a WeirError. */
  resume(exchange: Exchange, frame: ClientFrame): void {
    if (this.ended) throw new Cancelled("the client is closed", { requestId: exchange.requestId });
    if (this.current === undefined || !this.current.accepting) {
      const opened = new StreamConnection(this.openCall());
      this.current = opened;
      this.running.add(opened);
      void opened.ended.then(() => this.running.delete(opened));
    }
    this.current.start(exchange, frame);
  }

  /** Knows a request that is between two streams, until `forget`. */
  suspend(exchange: Exchange): void {
    this.suspended.add(exchange);
  }

  /** It is not between two streams any more. */
  forget(exchange: Exchange): void {
    this.suspended.delete(exchange);
  }

  /** Cancels what runs, waits a bounded time for the final frames, and ends the streams. */
  async close(): Promise<void> {
    this.closing.abort();
    const exchanges = [...[...this.running].flatMap((connection) => [...connection.exchanges.values()]), ...this.suspended];
    for (const exchange of exchanges) exchange.cancel();
    for (const exchange of exchanges) await exchange.waitEnded(); // bounded: each gives up by itself
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
