/** Scripted server on loopback, for behavior that a test cannot cause in the real server. */

import { create, fromBinary, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import {
  Server,
  ServerCredentials,
  type ServerDuplexStream,
  type ServerUnaryCall,
  type sendUnaryData,
  status,
} from "@grpc/grpc-js";
import { ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import {
  type ClientFrame,
  type GenerateRequest,
  GenerateRequestSchema,
  type GenerateResponse,
  GenerateResponseSchema,
  type EmbedRequest,
  EmbedRequestSchema,
  EmbedResponseSchema,
  ListModelsResponseSchema,
  type ServerFrameSchema,
} from "../src/gen/weir/v1/inference_service_pb.js";
import { FinishReason } from "../src/gen/weir/v1/types_pb.js";

/** One frame of the server, without its request id. */
export type Frame = MessageInitShape<typeof ServerFrameSchema>;

/** One `Generate` call from the server's side. */
export class ServerStream {
  private readonly unread: ClientFrame[] = [];
  private isEnded = false;
  private wake: () => void = () => {};

  /** `received`: where every frame is noted. */
  constructor(
    private readonly call: ServerDuplexStream<GenerateRequest, GenerateResponse>,
    received: ClientFrame[],
  ) {
    call.on("error", () => this.end()); // the client went away
    call.on("end", () => this.end());
    call.on("data", (message: GenerateRequest) => {
      this.unread.push(...message.frames);
      received.push(...message.frames);
      this.wake();
    });
  }

  /** The next frame of the client; undefined when it has half-closed. */
  async read(): Promise<ClientFrame | undefined> {
    while (this.unread.length === 0 && !this.isEnded)
      await new Promise<void>((resolve) => (this.wake = resolve));
    return this.unread.shift();
  }

  /** Writes frames in one message. */
  send(...frames: Frame[]): void {
    this.call.write(create(GenerateResponseSchema, { frames }));
  }

  /** Ends the call with a plain status. */
  abort(code: status, details: string): void {
    this.call.emit("error", { code, details });
  }

  private end(): void {
    this.isEnded = true;
    this.wake();
  }
}

export type Script = (stream: ServerStream) => Promise<void>;

/**
 * Runs one script per stream, and the last one for all further streams. Calls that list models get
 * the errors of `refusals`, then a response.
 */
export class ScriptedServer implements AsyncDisposable {
  address = "";
  readonly frames: ClientFrame[] = []; // of all streams
  readonly embeddings: EmbedRequest[] = [];
  streamCount = 0;
  listCount = 0;
  refusals: status[] = [];
  private readonly server = new Server();

  constructor(...scripts: Script[]) {
    const method = (name: string, isStream: boolean) => ({
      path: `/weir.v1.InferenceService/${name}`,
      requestStream: isStream,
      responseStream: isStream,
      requestSerialize: (message: GenerateRequest) =>
        Buffer.from(toBinary(GenerateRequestSchema, message)),
      requestDeserialize: (bytes: Buffer) =>
        isStream ? fromBinary(GenerateRequestSchema, bytes) : bytes,
      responseSerialize: (message: GenerateResponse | Uint8Array) =>
        Buffer.from(
          message instanceof Uint8Array ? message : toBinary(GenerateResponseSchema, message),
        ),
      responseDeserialize: (bytes: Buffer) => fromBinary(GenerateResponseSchema, bytes),
    });
    const Generate = (call: ServerDuplexStream<GenerateRequest, GenerateResponse>): void => {
      this.streamCount += 1;
      void scripts[Math.min(this.streamCount, scripts.length) - 1]!(
        new ServerStream(call, this.frames),
      ).finally(() => call.end());
    };
    const ListModels = (
      _: ServerUnaryCall<unknown, unknown>,
      answer: sendUnaryData<Uint8Array>,
    ): void => {
      this.listCount += 1;
      const code = this.refusals.shift();
      if (code !== undefined) answer({ code, details: "refused by the script" });
      else answer(null, toBinary(ListModelsResponseSchema, create(ListModelsResponseSchema, {})));
    };
    const Embed = (
      { request }: ServerUnaryCall<Uint8Array, unknown>,
      answer: sendUnaryData<Uint8Array>,
    ): void => {
      this.embeddings.push(fromBinary(EmbedRequestSchema, request));
      answer(null, toBinary(EmbedResponseSchema, create(EmbedResponseSchema, {})));
    };
    this.server.addService(
      {
        Generate: method("Generate", true),
        ListModels: method("ListModels", false),
        Embed: method("Embed", false),
      },
      { Generate, ListModels, Embed },
    );
  }

  /** Listens from here on. */
  async open(): Promise<this> {
    const port = await new Promise<number>((resolve, reject) =>
      this.server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) =>
        error ? reject(error) : resolve(bound),
      ),
    );
    this.address = `127.0.0.1:${port}`;
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.server.forceShutdown();
  }
}

/** A script: answers every request on the stream with these texts, a token each. */
export function answering(...texts: string[]): Script {
  return async (stream) => {
    for (let frame = await stream.read(); frame !== undefined; frame = await stream.read()) {
      const { requestId, kind } = frame;
      if (kind.case !== "start") continue;
      stream.send({ requestId, kind: { case: "admitted", value: { inputTokenCount: 5n } } });
      texts.forEach((text, index) => stream.send(delta(requestId, index + 1, text)));
      stream.send(finished(requestId, texts.length));
    }
  };
}

/** One token of text, whose id is its number. */
export function delta(requestId: string, seq: number, text: string): Frame {
  return { requestId, kind: { case: "delta", value: { seq: BigInt(seq), text, tokenIds: [seq] } } };
}

/** The end of a request that ran. */
export function finished(requestId: string, tokenCount: number): Frame {
  const usage = {
    inputTokenCount: 5n,
    deliveredTokenCount: BigInt(tokenCount),
    billedTokenCount: BigInt(tokenCount),
  };
  return {
    requestId,
    kind: {
      case: "finished",
      value: { reason: FinishReason.STOP, usage, cost: { currencyCode: "USD" } },
    },
  };
}

/** The server that runs the request does not answer. */
export function away(requestId: string): Frame {
  return unavailable(requestId, "PROCESS_UNAVAILABLE", 10);
}

/** The server wants to be asked again after so long. */
export function later(requestId: string, milliseconds: number): Frame {
  return unavailable(requestId, "OVERLOADED", milliseconds);
}

function unavailable(requestId: string, reason: string, waitMs: number): Frame {
  const info = anyPack(ErrorInfoSchema, create(ErrorInfoSchema, { reason, domain: "weir.dev" }));
  const retry = anyPack(
    RetryInfoSchema,
    create(RetryInfoSchema, { retryDelay: durationFromMs(waitMs) }),
  );
  const refusal = { code: status.UNAVAILABLE, message: "not now", details: [info, retry] };
  return { requestId, kind: { case: "failed", value: { status: refusal } } };
}
