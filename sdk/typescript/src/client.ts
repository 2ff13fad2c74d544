/** Client of the inference API. */

import { create, toBinary } from "@bufbuild/protobuf";
import { ATTACH, USAGE, checkOptions, invalid } from "./checks.js";
import {
  type CallOptionsOf,
  type ClientOptions,
  Connection,
  RetryPolicy,
  resolveSettings,
  tried,
} from "./connection.js";
import { usageGroups } from "./conversion.js";
import { InvalidRequest, NO_DETAILS } from "./errors.js";
import { ClientFrameSchema, InferenceService } from "./gen/weir/v1/inference_service_pb.js";
import type {
  Generation as RecordedGeneration,
  KeyRestrictions,
  Model,
  QuotaStatus,
  Quote,
  UsageReport,
} from "./generated_values.js";
import { Generation, setKeep } from "./generation.js";
import type {
  AttachOptions,
  CountOptions,
  EmbedOptions,
  GenerateOptions,
  OwnUsageOptions,
} from "./options.js";
import { buildCount, buildEmbed, buildStart, checkEncodable, dropUndefined } from "./prompt.js";
import { RESUME_MS } from "./resumption.js";
import { SharedStream } from "./stream.js";
import type { EmbedResult, Result, TokenCount } from "./values.js";
import * as wire from "./wire.js";

const FRAMING_BYTES = 16; // overhead of a message around its only frame, at most

/**
 * Connection to the inference API. All generations of a client share one stream and may run
 * concurrently.
 *
 * `close` it at the end, or declare it with `await using`.
 */
export class WeirClient implements AsyncDisposable {
  private readonly connection: Connection;
  private readonly stream: SharedStream;

  /**
   * Resolves the settings; the connection is made on first use.
   *
   * @throws Unauthenticated if there is no key.
   */
  constructor(options: ClientOptions = {}) {
    this.connection = new Connection(resolveSettings(options));
    const { settings } = this.connection;
    this.stream = new SharedStream(this.connection, tried(settings));
  }

  /** Address that this client connects to; several with commas between. */
  get address(): string {
    return this.connection.settings.address;
  }

  /**
   * Streams an answer. Errors of the server are thrown where the answer is read.
   *
   * @throws InvalidRequest for a request that cannot be encoded or exceeds `maxMessageBytes`.
   */
  generate(model: string, options: GenerateOptions): Generation {
    const frame = buildStart(model, this.labelled(options));
    const { retry, maxMessageBytes, timeoutMs: limitMs } = this.connection.settings;
    const timeoutMs = options.timeoutMs ?? limitMs;
    const keep = keepFor(options.keepOnDisconnectMs, timeoutMs, this.stream.keepMaxMs);
    setKeep(frame, keep.keepMs);
    const size = toBinary(ClientFrameSchema, frame).length + FRAMING_BYTES;
    if (size > maxMessageBytes) {
      // Sending it would end the shared stream and with it every other request.
      const description = `the request has ${size} bytes, and the limit is ${maxMessageBytes}`;
      const details = { ...NO_DETAILS, fieldViolations: [{ field: "prompt", description }] };
      throw new InvalidRequest(description, {
        reason: "MESSAGE_TOO_LARGE",
        requestId: frame.requestId,
        details,
      });
    }
    return new Generation(this.stream, frame, model, {
      timeoutMs,
      retry: new RetryPolicy(options.maxRetries ?? retry.maxRetries, retry.waitMaxMs),
      signal: options.signal,
      prefetchTokens: options.prefetchTokens,
      ...keep,
    });
  }

  /**
   * Receives a request of the project that was started earlier, by any client.
   *
   * The stream that received it until now gets `Aborted` with the reason `ATTACHED_ELSEWHERE`. The
   * request belongs to this client from then on: leaving its loop cancels it. Reading throws
   * NotFound for a request that was not admitted, AlreadyExists (`REQUEST_SETTLED`) for one that
   * has ended and is no longer kept, InvalidRequest (`OUTPUT_GONE`) for output that is not
   * available.
   */
  attach(requestId: string, options: AttachOptions = {}): Generation {
    const { afterSeq = 0, timeoutMs, resumeMs = RESUME_MS, prefetchTokens, signal } = options;
    checkOptions(options, ATTACH);
    const frame = create(ClientFrameSchema, {
      requestId,
      kind: { case: "attach", value: { afterSeq: BigInt(afterSeq) } },
    });
    checkEncodable(frame, "attach");
    const { retry, timeoutMs: limitMs } = this.connection.settings;
    return new Generation(this.stream, frame, "", {
      timeoutMs: timeoutMs ?? limitMs,
      retry,
      signal,
      keepMs: resumeMs,
      keepIsAsked: true,
      prefetchTokens,
    });
  }

  /** Returns the whole answer of a request; takes the options of `generate`. Throws a WeirError. */
  async complete(model: string, options: GenerateOptions): Promise<Result> {
    return await this.generate(model, options).result();
  }

  /**
   * Returns the size of a prompt, tools included, as admission counts it. Nothing is run or billed.
   *
   * @throws NotFound for an unknown model; InvalidRequest for tools together with `text`, or with a
   * model that does not support tools.
   */
  async countTokens(
    model: string,
    input: CountOptions,
    call: CallOptionsOf = {},
  ): Promise<TokenCount> {
    const response = await this.connection.call(
      InferenceService.method.countTokens,
      buildCount(model, input),
      call,
    );
    return {
      inputTokenCount: wire.count(response.inputTokenCount),
      contextWindowTokens: wire.count(response.contextWindowTokens),
    };
  }

  /** Returns tokens and cost of the same call of `generate`, and whether it would be admitted. */
  async quote(model: string, options: GenerateOptions, call: CallOptionsOf = {}): Promise<Quote> {
    const { kind } = buildStart(model, this.labelled(options));
    if (kind.case !== "start") throw invalid("start", "is missing");
    return wire.quote(
      await this.connection.call(InferenceService.method.quote, { start: kind.value }, call),
    );
  }

  /** Returns tokens and cost of the same call of `embed`, and whether it would be admitted. */
  async quoteEmbed(
    model: string,
    inputs: string | readonly (string | readonly number[])[],
    options: EmbedOptions = {},
  ): Promise<Quote> {
    const embed = buildEmbed(model, inputs, this.labelled(options));
    return wire.quote(
      await this.connection.call(InferenceService.method.quote, { embed }, options),
    );
  }

  /**
   * Returns vectors of one text or several, each a text or its token ids. Retried like every call
   * with the same request id, which is billed once.
   *
   * @throws InvalidRequest, QuotaExceeded, AlreadyExists if an earlier attempt was billed and its
   * answer lost; any WeirError.
   */
  async embed(
    model: string,
    inputs: string | readonly (string | readonly number[])[],
    options: EmbedOptions = {},
  ): Promise<EmbedResult> {
    const request = buildEmbed(model, inputs, this.labelled(options));
    const response = await this.connection.call(InferenceService.method.embed, request, options);
    return wire.embedResult(request.requestId, model, response);
  }

  /** Returns the models that the key may use, by name. */
  async listModels(call: CallOptionsOf = {}): Promise<Model[]> {
    return (await this.connection.call(InferenceService.method.listModels, {}, call)).models.map(
      wire.model,
    );
  }

  /**
   * Returns every limit that applies to the key, optionally for one model. Empty: unlimited.
   *
   * @param call.endUser also returns the limits of this end user. Default: the client's.
   * @param call.labels also returns the limits of these labels, added to the client's.
   */
  async getQuota(
    model = "",
    call: CallOptionsOf & {
      readonly endUser?: string | undefined;
      readonly labels?: Readonly<Record<string, string>> | undefined;
    } = {},
  ): Promise<QuotaStatus[]> {
    const { settings } = this.connection;
    const init = {
      model,
      endUser: call.endUser ?? settings.endUser ?? "",
      labels: { ...settings.labels, ...call.labels },
    };
    const response = await this.connection.call(InferenceService.method.getQuota, init, call);
    return response.quotas.map(wire.quotaStatus);
  }

  /** Returns the key's scopes, models, tokens per request, networks and expiry. */
  async getRestrictions(call: CallOptionsOf = {}): Promise<KeyRestrictions> {
    return wire.keyRestrictions(
      (await this.connection.call(InferenceService.method.getQuota, {}, call)).restrictions,
    );
  }

  /** Returns the record of one request of the key's project. Throws NotFound. */
  async getGeneration(requestId: string, call: CallOptionsOf = {}): Promise<RecordedGeneration> {
    const response = await this.connection.call(
      InferenceService.method.getGeneration,
      { requestId },
      call,
    );
    if (response.generation === undefined)
      throw new Error("the server answered without a generation");
    return wire.generation(response.generation);
  }

  /**
   * Returns usage and cost of this key, or of its project, by day (UTC) and model by default.
   * `cost` is exact, before plan, credit and tax; it includes usage not posted yet.
   */
  async usage(options: OwnUsageOptions = {}, call: CallOptionsOf = {}): Promise<UsageReport> {
    checkOptions(options, USAGE);
    const { by = [], ...fields } = options;
    const groups = usageGroups("by", by);
    return wire.usageReport(
      await this.connection.call(
        InferenceService.method.getOwnUsage,
        { ...fields, ...groups },
        call,
      ),
    );
  }

  /**
   * Cancels running requests, waits a few seconds at most for their settlement, and closes the
   * connection.
   */
  async close(): Promise<void> {
    await this.stream.close();
    this.connection.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Adds the labels and the end user of the client to those of a call, which win. */
  private labelled<Options extends GenerateOptions | EmbedOptions>(options: Options): Options {
    const { labels, endUser } = this.connection.settings;
    if (Object.keys(labels).length === 0 && endUser === undefined) return options;
    return {
      ...options,
      labels: { ...labels, ...options.labels },
      ...dropUndefined({ endUser: options.endUser ?? endUser }),
    };
  }
}

/**
 * Returns how long a request outlives its connection: as given by the caller, else a short time
 * limited by the caller's timeout and the server's known limit.
 */
function keepFor(
  keepOnDisconnectMs: number | undefined,
  timeoutMs: number | undefined,
  keepMaxMs: number,
): { keepMs: number; keepIsAsked: boolean } {
  if (
    keepOnDisconnectMs !== undefined &&
    !(Number.isFinite(keepOnDisconnectMs) && keepOnDisconnectMs >= 0)
  ) {
    throw invalid("keepOnDisconnectMs", `must be milliseconds, not ${keepOnDisconnectMs}`);
  }
  if (keepOnDisconnectMs !== undefined) return { keepMs: keepOnDisconnectMs, keepIsAsked: true };
  const keepMs =
    keepMaxMs > 0 ? Math.max(1, Math.min(RESUME_MS, keepMaxMs, timeoutMs ?? RESUME_MS)) : 0;
  return { keepMs, keepIsAsked: false };
}
