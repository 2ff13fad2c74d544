/**
 * Connection to the server: address, TLS, API key, channel options, unary calls with typed errors.
 */

import { BlockList, isIP } from "node:net";
import {
  create,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  fromBinary,
  type MessageInitShape,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import {
  type CallOptions,
  type ChannelOptions,
  Client,
  type ClientDuplexStream,
  credentials,
  Metadata,
  type ServiceError,
} from "@grpc/grpc-js";
import { checkKnown, checkOptions, GENERATE, invalid } from "./checks.js";
import {
  Cancelled,
  CLOSED,
  QuotaExceeded,
  Unauthenticated,
  Unavailable,
  WeirError,
} from "./errors.js";
import {
  type GenerateRequest,
  GenerateRequestSchema,
  type GenerateResponse,
  GenerateResponseSchema,
} from "./gen/weir/v1/inference_service_pb.js";
import { BalancedClients, ROUND_ROBIN } from "./balancing.js";
import { checkedKey, CurrentKey, type KeySource } from "./key.js";
import { closingController, pause } from "./pause.js";
import { errorFromRpc } from "./status.js";
import { resolveTls, type Tls, type TlsOptions } from "./tls.js";

/** The server's default address. */
export const DEFAULT_ADDRESS = "127.0.0.1:8443";
const UNARY_TIMEOUT_MS = 30_000; // look-ups take milliseconds
const MESSAGE_BYTES_MAX = 4 * 1024 * 1024; // gRPC's default limit of a server
// Batched deltas of many requests; far above the largest response of a server.
const RECEIVE_BYTES_MAX = 32 * 1024 * 1024;
const KEEPALIVE_MS = 60_000; // below the idle limit of common load balancers (60 to 350 s)
// A peer that does not answer a ping within it is considered lost.
const KEEPALIVE_TIMEOUT_MS = 20_000;
const RETRY_BASE_MS = 100; // first back-off without a retry-after of the server; doubles each time
const RETRY_WAIT_MAX_MS = 10_000; // the error is thrown if the wait would be longer

/** Options of a client. */
export interface ClientOptions extends TlsOptions {
  /**
   * `host:port`, `unix:/path`, or either after `https://` or `http://`. Default `WEIR_ADDRESS`,
   * then this machine. Several servers: a list, or commas between.
   */
  readonly address?: string | readonly string[];
  /**
   * Default `WEIR_API_KEY`; empty: call without a key. Or a function that returns a token: it is
   * called at the first use, before a JSON Web Token expires, and once if the server refuses a
   * token.
   */
  readonly apiKey?: KeySource;
  /**
   * Further attempts for UNAVAILABLE, and for a quota that resets within `retryWaitMaxMs`: only
   * before the first token, with the same request id and the server's retry-after. Default 2.
   */
  readonly maxRetries?: number;
  /** The longest wait before a further attempt. Default 10,000. */
  readonly retryWaitMaxMs?: number;
  /** The largest request that is sent; the server has its own limit. Default 4 MiB. */
  readonly maxMessageBytes?: number;
  /** Milliseconds between pings on a silent connection. Default 60,000. */
  readonly keepaliveMs?: number;
  /**
   * Milliseconds for each call without a `timeoutMs` of its own, retries included. Default: no
   * limit for a generation, 30,000 for other calls.
   */
  readonly timeoutMs?: number;
  /** Labels of every generation and embedding, besides those of the call itself. */
  readonly labels?: Readonly<Record<string, string>>;
  /** Your own user for whom requests are made, unless a request names another. */
  readonly endUser?: string;
}

/** Retries at most `maxRetries` times, and never after a wait of more than `waitMaxMs`. */
export class RetryPolicy {
  constructor(
    readonly maxRetries: number,
    readonly waitMaxMs: number,
  ) {}

  /**
   * Returns the milliseconds before retry number `attempt` (from 0), with jitter; undefined to
   * throw the error.
   *
   * The server's retry-after is a lower bound; jitter is added to it so that refused clients do not
   * all return at once.
   */
  waitMs(error: WeirError, attempt: number): number | undefined {
    if (attempt >= this.maxRetries) return undefined;
    const hint = error.retryAfterMs;
    if (error instanceof QuotaExceeded) {
      if (hint === undefined || !error.retryHelps) return undefined;
    } else if (!(error instanceof Unavailable)) {
      return undefined;
    }
    if ((hint ?? 0) > this.waitMaxMs) return undefined;
    const spread = RETRY_BASE_MS * 2 ** attempt;
    return hint === undefined ? spread * (0.5 + Math.random() / 2) : hint + spread * Math.random();
  }
}

/** Resolved address and options of a connection. */
export interface ConnectionSettings {
  readonly address: string;
  readonly apiKey: KeySource;
  readonly tls: Tls | undefined;
  readonly maxMessageBytes: number;
  readonly keepaliveMs: number;
  readonly retry: RetryPolicy;
  readonly timeoutMs: number | undefined;
  readonly labels: Readonly<Record<string, string>>;
  readonly endUser: string | undefined;
}

const KNOWN: Readonly<Record<keyof ClientOptions, true>> = {
  address: true,
  apiKey: true,
  maxRetries: true,
  retryWaitMaxMs: true,
  maxMessageBytes: true,
  keepaliveMs: true,
  timeoutMs: true,
  labels: true,
  endUser: true,
  tls: true,
  rootCertificates: true,
  clientCertificate: true,
  clientKey: true,
};
const CLIENT_OPTIONS = Object.keys(KNOWN);
const LISTS = /^ipv[46]:/; // those that are lists themselves
const SCHEMES = [
  ["https://", true],
  ["grpcs://", true],
  ["http://", false],
  ["grpc://", false],
] as const;

/**
 * Resolves missing values from the environment.
 *
 * @throws Unauthenticated if there is no key; InvalidRequest for invalid certificates and unknown
 * options.
 */
export function resolveSettings(
  options: ClientOptions,
  environment = process.env,
  keyVariables: readonly string[] = ["WEIR_API_KEY"],
): ConnectionSettings {
  checkKnown(options, CLIENT_OPTIONS);
  const { address, isSecure } = resolveAddresses(
    options.address?.length ? "address" : "WEIR_ADDRESS",
    (options.address?.length && options.address) || environment["WEIR_ADDRESS"] || DEFAULT_ADDRESS,
  );
  const variable = keyVariables.find((each) => environment[each] !== undefined);
  const apiKey = options.apiKey ?? environment[variable ?? ""];
  if (apiKey === undefined)
    throw new Unauthenticated(`no API key: pass apiKey or set ${keyVariables.join(" or ")}`);
  const { timeoutMs } = options;
  if (timeoutMs !== undefined && !(typeof timeoutMs === "number" && timeoutMs > 0))
    throw invalid("timeoutMs", `must be a number of milliseconds above 0, not ${timeoutMs}`);
  const { labels, endUser } = options;
  checkOptions({ labels, endUser }, { labels: GENERATE.labels, endUser: GENERATE.endUser });
  const local = isLocal(address);
  return {
    address,
    apiKey: typeof apiKey === "function" ? apiKey : checkedKey(apiKey),
    tls: resolveTls(options, isSecure, local, environment),
    maxMessageBytes: options.maxMessageBytes ?? MESSAGE_BYTES_MAX,
    keepaliveMs: options.keepaliveMs ?? KEEPALIVE_MS,
    retry: new RetryPolicy(options.maxRetries ?? 2, options.retryWaitMaxMs ?? RETRY_WAIT_MAX_MS),
    timeoutMs,
    labels: labels ?? {},
    endUser,
  };
}

/** Splits addresses at their commas. A list that gRPC resolves, such as ipv4:…, is one. */
function splitAddresses(address: string): string[] {
  return LISTS.test(address) ? [address] : address.split(",").map((each) => each.trim());
}

/**
 * Returns the addresses without schemes, with commas between, and whether they require TLS. `field`
 * is their source. Throws InvalidRequest for an invalid address, or if only some mean TLS.
 */
function resolveAddresses(
  field: string,
  given: string | readonly string[],
): { address: string; isSecure: boolean | undefined } {
  const addresses = typeof given === "string" ? splitAddresses(given) : given;
  if (!Array.isArray(addresses) || !addresses.every((each) => typeof each === "string"))
    throw invalid(field, "must be a string or a list of strings");
  const schemes = new Set<boolean | undefined>();
  const targets = addresses.map((each: string) => {
    const [scheme, isSecure] = SCHEMES.find(([prefix]) => each.startsWith(prefix)) ?? [""];
    schemes.add(isSecure);
    const target = scheme ? each.slice(scheme.length).replace(/\/+$/, "") : each;
    checkAddress(field, target || ":");
    return target;
  });
  if (schemes.size > 1)
    throw invalid(field, "must have the same scheme for all servers: https:// or http://, or none");
  return { address: targets.join(","), isSecure: [...schemes][0] };
}

/** Checks the form of an address. `field`: where it comes from. Throws InvalidRequest. */
function checkAddress(field: string, address: string): void {
  if (/^(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):/.test(address)) return;
  const right = "must be host:port, such as weir.example.com:443, or unix:/path";
  if (address.includes("/"))
    throw invalid(field, `${right}; "${address}" has a path: the SDK calls gRPC, not the HTTP API`);
  const [, host, port] = /^(.*):([^:]*)$/.exec(address) ?? [];
  // A name or an IPv6 address alone.
  if (host === undefined || (host.includes(":") && !host.endsWith("]"))) return;
  if (!host || !/^\d+$/.test(port!) || Number(port) < 1 || Number(port) > 65_535)
    throw invalid(field, `${right}, with a port from 1 to 65535; got "${address}"`);
}

/** Returns what a call tried to reach, for the message of a failed connection. */
export function tried({ address, tls }: ConnectionSettings): string {
  return `${address} ${tls ? "with" : "without"} TLS`;
}

const LOOPBACK = new BlockList();
LOOPBACK.addSubnet("127.0.0.0", 8);
LOOPBACK.addAddress("::1", "ipv6");

/**
 * Returns whether an address is on this machine: a unix socket, `localhost`, or a loopback IP.
 * Several addresses are if each of them is.
 */
export function isLocal(address: string): boolean {
  const addresses = splitAddresses(address);
  if (addresses.length > 1) return addresses.every(isLocal);
  if (address.startsWith("unix:") || address.startsWith("unix-abstract:")) return true;
  const hostAndPort = address.slice(address.lastIndexOf("/") + 1);
  const host = hostAndPort
    .slice(0, Math.max(0, hostAndPort.lastIndexOf(":")))
    .replace(/^\[|\]$/g, "");
  const version = isIP(host);
  return version === 0
    ? host === "localhost"
    : LOOPBACK.check(host, version === 6 ? "ipv6" : "ipv4");
}

/** One open `Generate` call. */
export type GenerateCall = ClientDuplexStream<GenerateRequest, GenerateResponse>;

/** One channel with its credentials. */
export class Connection {
  readonly key: CurrentKey;
  private readonly clients: BalancedClients;
  private readonly closing = closingController();

  constructor(readonly settings: ConnectionSettings) {
    const { tls } = settings;
    this.key = new CurrentKey(settings.apiKey);
    const security = tls
      ? credentials.createSsl(
          tls.rootCertificates ?? null,
          tls.clientKey ?? null,
          tls.clientCertificate ?? null,
        )
      : credentials.createInsecure();
    this.clients = new BalancedClients(
      splitAddresses(settings.address).map(
        (address) => new Client(address, security, channelOptions(settings, address)),
      ),
    );
  }

  /**
   * Waits until a call can be made, for a server and for a key; undefined if that is so now.
   * Rejects with Unauthenticated.
   */
  connected(): Promise<void> | undefined {
    const [connected, renewed] = [this.clients.connected(), this.key.renewed()];
    return connected && renewed
      ? Promise.all([connected, renewed]).then(() => {})
      : (connected ?? renewed);
  }

  /** Closes the channel. */
  close(): void {
    this.closing.abort();
    this.clients.close();
  }

  /** Opens the stream that all requests of a client share. */
  openGenerate(): GenerateCall {
    return this.clients.next().makeBidiStreamRequest(
      "/weir.v1.InferenceService/Generate",
      (message: GenerateRequest) => Buffer.from(toBinary(GenerateRequestSchema, message)),
      (bytes: Buffer) => fromBinary(GenerateResponseSchema, bytes),
      this.metadata(),
    );
  }

  /**
   * Makes one unary call, retried if it is idempotent; `timeoutMs` includes retries, default 30 s.
   *
   * @throws WeirError
   */
  async call<Method extends DescMethodUnary>(
    method: Method,
    init: MessageInitShape<Method["input"]>,
    {
      timeoutMs = this.settings.timeoutMs ?? UNARY_TIMEOUT_MS,
      maxRetries = this.settings.retry.maxRetries,
      signal,
    }: CallOptionsOf = {},
    isIdempotent = true,
  ): Promise<MessageShape<Method["output"]>> {
    const retry = new RetryPolicy(maxRetries, this.settings.retry.waitMaxMs);
    const deadline = performance.now() + timeoutMs;
    const request = toBinary(method.input, create(method.input, init));
    let isRenewed = false;
    for (let attempt = 0; ; attempt += 1) {
      let key = "";
      try {
        const ready = this.ready(timeoutMs, signal);
        if (ready !== undefined) await ready;
        key = this.key.text;
        return await this.attempt(
          method,
          request,
          Math.max(0, deadline - performance.now()),
          signal,
        );
      } catch (error) {
        if (signal?.aborted && error instanceof Cancelled) throw signal.reason;
        if (this.closing.signal.aborted)
          throw new Cancelled(CLOSED, { cause: error });
        if (this.key.renews(error) && this.key.refused(key) && !isRenewed) {
          isRenewed = true; // the call has not run, so it may be repeated
          attempt -= 1;
          continue;
        }
        const waitMs =
          isIdempotent && error instanceof WeirError
            ? retry.waitMs(error, attempt)
            : undefined;
        if (waitMs === undefined || performance.now() + waitMs >= deadline) throw error;
        if (!(await pause(waitMs, [signal, this.closing.signal]))) {
          if (signal?.aborted) throw signal.reason;
          throw new Cancelled("the client was closed while waiting to try again");
        }
      }
    }
  }

  /** Makes one call with streamed responses; returns all of them. Throws a WeirError. */
  async collect<Method extends DescMethodServerStreaming>(
    method: Method,
    init: MessageInitShape<Method["input"]>,
    options: CallOptionsOf = {},
  ): Promise<MessageShape<Method["output"]>[]> {
    const received: MessageShape<Method["output"]>[] = [];
    for await (const each of this.responses(method, init, options)) received.push(each);
    return received;
  }

  /** Yields the responses of a read-only streaming call as they arrive. */
  async *responses<Method extends DescMethodServerStreaming>(
    method: Method,
    init: MessageInitShape<Method["input"]>,
    { timeoutMs = this.settings.timeoutMs ?? UNARY_TIMEOUT_MS, signal }: CallOptionsOf = {},
  ): AsyncGenerator<MessageShape<Method["output"]>, void, void> {
    const ready = this.ready(timeoutMs, signal);
    if (ready !== undefined) await ready;
    signal?.throwIfAborted();
    const key = this.key.text;
    const call = this.clients.next().makeServerStreamRequest(
      `/${method.parent.typeName}/${method.name}`,
      (message: Uint8Array) => Buffer.from(message),
      (bytes: Buffer) => fromBinary(method.output, bytes) as MessageShape<Method["output"]>,
      toBinary(method.input, create(method.input, init)),
      this.metadata(),
      { deadline: Date.now() + timeoutMs },
    );
    const abort = (): void => call.cancel();
    signal?.addEventListener("abort", abort, { once: true });
    try {
      for await (const each of call) yield each as MessageShape<Method["output"]>;
    } catch (error) {
      if (signal?.aborted) throw signal.reason;
      const failure = errorFromRpc(error as ServiceError, false, "", tried(this.settings));
      if (this.key.renews(failure)) this.key.refused(key);
      throw failure;
    } finally {
      signal?.removeEventListener("abort", abort);
      call.cancel();
    }
  }

  private attempt<Method extends DescMethodUnary>(
    method: Method,
    request: Uint8Array,
    remainingMs: number,
    signal: AbortSignal | undefined,
  ): Promise<MessageShape<Method["output"]>> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(new Cancelled("the call was aborted before it began"));
        return;
      }
      if (this.closing.signal.aborted) {
        reject(new Cancelled(CLOSED));
        return;
      }
      const options: CallOptions = { deadline: Date.now() + remainingMs };
      const call = this.clients.next().makeUnaryRequest(
        `/${method.parent.typeName}/${method.name}`,
        (message: Uint8Array) => Buffer.from(message),
        (bytes: Buffer) => fromBinary(method.output, bytes) as MessageShape<Method["output"]>,
        request,
        this.metadata(),
        options,
        (error: ServiceError | null, response?: MessageShape<Method["output"]>) => {
          signal?.removeEventListener("abort", abort);
          if (error)
            reject(errorFromRpc(error, signal?.aborted ?? false, "", tried(this.settings)));
          else resolve(response as MessageShape<Method["output"]>);
        },
      );
      const abort = (): void => call.cancel();
      signal?.addEventListener("abort", abort, { once: true });
    });
  }

  /** As `connected`, for at most `timeoutMs`: the call then fails with the reason. */
  private ready(timeoutMs: number, signal: AbortSignal | undefined): Promise<void> | undefined {
    const connected = this.connected();
    if (connected === undefined) return undefined;
    const over = new AbortController();
    const limits = [signal, this.closing.signal, over.signal];
    return Promise.race([connected, pause(timeoutMs, limits)])
      .then(() => {})
      .finally(() => over.abort());
  }

  private metadata(): Metadata {
    const metadata = new Metadata();
    if (this.key.text) metadata.set("authorization", `Bearer ${this.key.text}`);
    return metadata;
  }
}

/** Options of every unary call. */
export interface CallOptionsOf {
  /** Milliseconds for the call, retries included. Default 30,000. */
  readonly timeoutMs?: number | undefined;
  /** Further attempts of a call that can be repeated; default: the client's setting. */
  readonly maxRetries?: number | undefined;
  /** Cancels the call, which rejects with the reason of the signal. */
  readonly signal?: AbortSignal | undefined;
}

function channelOptions(settings: ConnectionSettings, address: string): ChannelOptions {
  return {
    "grpc.primary_user_agent": "weir-client-node/0.0.0",
    "grpc.max_send_message_length": settings.maxMessageBytes,
    "grpc.max_receive_message_length": Math.max(RECEIVE_BYTES_MAX, settings.maxMessageBytes),
    "grpc.keepalive_time_ms": settings.keepaliveMs,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.keepalive_permit_without_calls": 0,
    // Fast reconnection to a restarted server: gRPC's defaults are 1 s, growing to minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5000,
    // One subchannel per client, so that the back-off or GOAWAY of one does not affect another.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_retries": 0, // this client's own retries take delivered output into account
    ...(isLocal(address)
      ? { "grpc.enable_http_proxy": 0 }
      : { "grpc.service_config": ROUND_ROBIN }),
  };
}
