/** The client of the inference API. */

import { create, toBinary } from "@bufbuild/protobuf";
import { ATTACH, checkOptions, invalid } from "./checks.js";
import { type CallOptionsOf, type ClientOptions, Connection, RetryPolicy, resolveSettings } from "./connection.js";
import { InvalidRequest, NO_DETAILS } from "./errors.js";
import { ClientFrameSchema, InferenceService } from "./gen/weir/v1/inference_service_pb.js";
import { Generation, setKeep } from "./generation.js";
import type { AttachOptions, CountOptions, EmbedOptions, GenerateOptions } from "./options.js";
import { buildCount, buildEmbed, buildStart, checkEncodable } from "./prompt.js";
import { RESUME_MS } from "./resumption.js";
import { SharedStream } from "./stream.js";
import type { KeyRestrictions, Model, Quote, TokenCount } from "./models.js";
import type { EmbedResult, Generation as RecordedGeneration, QuotaStatus, Result } from "./values.js";
import * as wire from "./wire.js";

const FRAMING_BYTES = 16; // what a message adds to its only frame, at most

/**
 * A connection to the inference API. All generations of a client share one stream; run as many at once as you like.
 *
 * `close` it at the end, or declare it with `await using`.
 */
export class WeirClient implements AsyncDisposable {
  private readonly connection: Connection;
  private readonly stream: SharedStream;

  /**
   * Settles where to connect; the connection itself is made when it is first used.
   *
   * @throws Unauthenticated if there is no key.
   */
  constructor(options: ClientOptions = {}) {
    this.connection = new Connection(resolveSettings(options));
    this.stream = new SharedStream(() => this.connection.openGenerate());
  }

  /** Where this client connects to. */
  get address(): string {
    return this.connection.settings.address;
  }

  /**
   * A streamed answer. Everything that can go wrong at the server is thrown where the answer is read.
   *
   * @throws InvalidRequest for a request that cannot be written down or is larger than `maxMessageBytes`.
   */
  generate(model: string, options: GenerateOptions): Generation {
    const frame = buildStart(model, options);
    const keep = keepFor(options, this.stream.keepMaxMs);
    setKeep(frame, keep.keepMs);
    const { retry, maxMessageBytes } = this.connection.settings;
    const size = toBinary(ClientFrameSchema, frame).length + FRAMING_BYTES;
    if (size > maxMessageBytes) {
      // Sent all the same, it would end the shared stream, and every other request with it.
      const description = `the request has ${size} bytes, and the limit is ${maxMessageBytes}`;
      const details = { ...NO_DETAILS, fieldViolations: [{ field: "prompt", description }] };
      throw new InvalidRequest(description, { reason: "MESSAGE_TOO_LARGE", requestId: frame.requestId, details });
    }
    return new Generation(this.stream, frame, model, {
      timeoutMs: options.timeoutMs,
      retry: new RetryPolicy(options.maxRetries ?? retry.maxRetries, retry.waitMaxMs),
      signal: options.signal,
      prefetchTokens: options.prefetchTokens,
      ...keep,
    });
  }

  /**
   * Receives a request of the project that was started before, by whatever client.
   *
   * The stream that received it until now is told `Aborted` with the reason `ATTACHED_ELSEWHERE`. The request is this client's from
   * then on: leaving its loop cancels it. Where it is read, NotFound is thrown for a request that was not admitted, AlreadyExists
   * (`REQUEST_SETTLED`) for one that is over and not kept any more, InvalidRequest (`OUTPUT_GONE`) for output that is not there.
   */
  attach(requestId: string, options: AttachOptions = {}): Generation {
    const { afterSeq = 0, timeoutMs, resumeMs = RESUME_MS, prefetchTokens, signal } = options;
    checkOptions(options, ATTACH);
    const frame = create(ClientFrameSchema, { requestId, kind: { case: "attach", value: { afterSeq: BigInt(afterSeq) } } });
    checkEncodable(frame, "attach");
    const { retry } = this.connection.settings;
    return new Generation(this.stream, frame, "", { timeoutMs, retry, signal, keepMs: resumeMs, keepIsAsked: true, prefetchTokens });
  }

  /** The whole answer at once. Takes what `generate` takes. Throws a WeirError. */
  async complete(model: string, options: GenerateOptions): Promise<Result> {
    return await this.generate(model, options).result();
  }

  /**
   * The size of a prompt as admission counts it, with the tools that the model is shown, without running or billing anything.
   *
   * @throws NotFound for an unknown model; InvalidRequest for tools beside a `text`, or that the model cannot be shown.
   */
  async countTokens(model: string, input: CountOptions, call: CallOptionsOf = {}): Promise<TokenCount> {
    const response = await this.connection.call(InferenceService.method.countTokens, buildCount(model, input), call);
    return { inputTokenCount: wire.count(response.inputTokenCount), contextWindowTokens: wire.count(response.contextWindowTokens) };
  }

  /** What the same call of `generate` would count and cost, and whether it would be let in, without running it. */
  async quote(model: string, options: GenerateOptions, call: CallOptionsOf = {}): Promise<Quote> {
    const { kind } = buildStart(model, options);
    if (kind.case !== "start") throw invalid("start", "is missing");
    return wire.quote(await this.connection.call(InferenceService.method.quote, { start: kind.value }, call));
  }

  /** What the same call of `embed` would count and cost, and whether it would be let in, without embedding anything. */
  async quoteEmbed(model: string, inputs: string | readonly (string | readonly number[])[], options: EmbedOptions = {}): Promise<Quote> {
    const { timeoutMs, signal } = options;
    const embed = buildEmbed(model, inputs, options);
    return wire.quote(await this.connection.call(InferenceService.method.quote, { embed }, { timeoutMs, signal }));
  }

  /**
   * Vectors of texts: of one, or of several, each a text or its token ids. Tried again like every call, with the same request id, which
   * is billed once.
   *
   * @throws InvalidRequest, QuotaExceeded, AlreadyExists if an earlier attempt was billed and its answer lost; any WeirError.
   */
  async embed(model: string, inputs: string | readonly (string | readonly number[])[], options: EmbedOptions = {}): Promise<EmbedResult> {
    const request = buildEmbed(model, inputs, options);
    const { timeoutMs, signal } = options;
    const response = await this.connection.call(InferenceService.method.embed, request, { timeoutMs, signal });
    return wire.embedResult(request.requestId, model, response);
  }

  /** The models that the key may use, by name. */
  async listModels(call: CallOptionsOf = {}): Promise<Model[]> {
    return (await this.connection.call(InferenceService.method.listModels, {}, call)).models.map(wire.model);
  }

  /** Every limit that applies to the key, or to the key and one model. Empty: unlimited. */
  async getQuota(model = "", call: CallOptionsOf = {}): Promise<QuotaStatus[]> {
    return (await this.connection.call(InferenceService.method.getQuota, { model }, call)).quotas.map(wire.quota);
  }

  /** What the key is good for: scopes, models, tokens of one request, networks, until when. */
  async getRestrictions(call: CallOptionsOf = {}): Promise<KeyRestrictions> {
    return wire.restrictions((await this.connection.call(InferenceService.method.getQuota, {}, call)).restrictions);
  }

  /** What is recorded of one request of the key's project. Throws NotFound. */
  async getGeneration(requestId: string, call: CallOptionsOf = {}): Promise<RecordedGeneration> {
    const response = await this.connection.call(InferenceService.method.getGeneration, { requestId }, call);
    if (response.generation === undefined) throw new Error("the server answered without a generation");
    return wire.generation(response.generation);
  }

  /** Cancels what runs, waits at most a few seconds for its settlement, and closes the connection. */
  async close(): Promise<void> {
    await this.stream.close();
    this.connection.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

/**
 * How long a request outlives its connection: as the caller says, else for a short time and never for longer than the caller waits, or
 * than the server has said that it keeps requests.
 */
function keepFor({ keepOnDisconnectMs, timeoutMs }: GenerateOptions, keepMaxMs: number): { keepMs: number; keepIsAsked: boolean } {
  if (keepOnDisconnectMs !== undefined && !(Number.isFinite(keepOnDisconnectMs) && keepOnDisconnectMs >= 0)) {
    throw invalid("keepOnDisconnectMs", `must be milliseconds, not ${keepOnDisconnectMs}`);
  }
  if (keepOnDisconnectMs !== undefined) return { keepMs: keepOnDisconnectMs, keepIsAsked: true };
  const keepMs = keepMaxMs > 0 ? Math.max(1, Math.min(RESUME_MS, keepMaxMs, timeoutMs ?? RESUME_MS)) : 0;
  return { keepMs, keepIsAsked: false };
}
