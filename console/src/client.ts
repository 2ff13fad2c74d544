// Calls to the server: the RPCs of the contract in protobuf's JSON, files, and streamed chats.

import type { MessageJsonType, DescMessage } from "@bufbuild/protobuf";
import type { AdminService } from "./gen/weir/v1/admin_service_pb.js";
import type { BillingService } from "./gen/weir/v1/billing_service_pb.js";
import type { InferenceService } from "./gen/weir/v1/inference_service_pb.js";
import type { ReceiptService } from "./gen/weir/v1/receipt_service_pb.js";
import { authenticated } from "./credentials.js";
import { text } from "./texts.js";

type Methods<Service> = Service extends { method: infer Found } ? Found : never;
type Message<Schema> = Schema extends DescMessage ? MessageJsonType<Schema> : never;
type Offered<Name extends string, Service> = {
  [
    Method in keyof Methods<Service> & string as `${Name}/${Capitalize<Method>}`
  ]: Methods<Service>[Method] extends {
    input: infer Input;
    output: infer Output;
  }
    ? { request: Message<Input>; response: Message<Output> }
    : never;
};
// Every RPC of the contract with its messages. The server offers a part of them to the page.
export type Calls = Offered<"AdminService", typeof AdminService> &
  Offered<"BillingService", typeof BillingService> &
  Offered<"InferenceService", typeof InferenceService> &
  Offered<"ReceiptService", typeof ReceiptService>;
export type Name = keyof Calls;
export type Request<Call extends Name> = Calls[Call]["request"];
export type Response<Call extends Name> = Calls[Call]["response"];

// The permissions of the signed-in key.
export interface Session {
  keyPrefix: string;
  organizationId: string;
  currencyCode: string;
  scopes: string[];
  isOperator: boolean;
  calls: Name[];
}

interface Detail {
  "@type": string;
  reason?: string;
  retryDelay?: string;
  links?: { url?: string; description?: string }[];
  fieldViolations?: { field?: string; description?: string }[];
}

const TIMEOUT_MS = 40_000; // reports may take 30 s

// Failed call, from a `google.rpc.Status`; `httpStatus` is 0 if the server could not be reached.
export class CallFailed extends Error {
  readonly details: Detail[];

  constructor(
    readonly httpStatus: number,
    status: { message?: string; details?: Detail[] },
  ) {
    super(status.message || text.errors.noReason);
    this.details = status.details ?? [];
  }

  // Error detail by its type's name: ErrorInfo, BadRequest, RetryInfo, Help.
  detail(name: string): Detail | undefined {
    return this.details.find((each) => String(each["@type"]).endsWith(`.${name}`));
  }
}

async function send(
  path: string,
  {
    key,
    body,
    signal,
    timeoutMs = TIMEOUT_MS,
  }: { key?: string; body?: unknown; signal?: AbortSignal; timeoutMs?: number },
): Promise<globalThis.Response> {
  const { headers, credentials } = authenticated(key);
  const signals = [AbortSignal.timeout(timeoutMs), ...(signal ? [signal] : [])];
  let response;
  try {
    response = await fetch(path, {
      ...(body === undefined ? {} : { method: "POST", body: JSON.stringify(body) }),
      headers: {
        ...headers,
        ...(body === undefined ? {} : { "content-type": "application/json" }),
      },
      credentials,
      cache: "no-store",
      redirect: "error",
      signal: AbortSignal.any(signals),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    const isLate = error instanceof DOMException && error.name === "TimeoutError";
    throw new CallFailed(0, { message: isLate ? text.errors.late : text.errors.unreachable });
  }
  if (response.ok) return response;
  const refusal = await response.json().catch(() => ({ message: `HTTP ${response.status}` }));
  throw new CallFailed(response.status, refusal.error ?? refusal); // OpenAI's paths: in `error`
}

// Permissions of a key. Throws CallFailed.
export async function session(key?: string): Promise<Session> {
  return (await send("api/session", key === undefined ? {} : { key })).json();
}

// RPC of the contract. Throws CallFailed.
export async function call<Call extends Name>(
  name: Call,
  request: Request<Call>,
  signal?: AbortSignal,
): Promise<Response<Call>> {
  return (await send(`api/${name}`, { body: request, ...(signal ? { signal } : {}) })).json();
}

export interface File {
  name: string;
  content: Blob;
}

// File returned by an RPC, with its name. Throws CallFailed.
export async function file<Call extends Name>(name: Call, request: Request<Call>): Promise<File> {
  const response = await send(`api/${name}`, { body: request });
  const match = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "");
  return { name: match?.[1] ?? "file", content: await response.blob() };
}

// Content of a field of bytes.
export function blobOf(content = ""): Blob {
  return new Blob([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))]);
}

// Save a file in the browser's downloads.
export function save({ name, content }: File): void {
  const url = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// Idempotency key of a change. `crypto.randomUUID` exists only in secure contexts.
export function newRequestId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6]! & 0x0f) | 0x40;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  const digits = [...bytes].map((each) => each.toString(16).padStart(2, "0")).join("");
  return digits.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

// Part of a streamed chat: its id, then text, and at the end the usage and the exact cost.
export interface ChatPart {
  requestId?: string;
  delta?: string;
  finishReason?: string;
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number };
  };
  cost?: { currency_code: string; picos: string };
  timings?: { ttft_ms?: number; tokens_per_second?: number };
}

export const CHAT_PATH = "../v1/chat/completions"; // beside the console, behind any path prefix
const CHAT_TIMEOUT_MS = 3_600_000;

// Stream a chat over the HTTP API. Throws CallFailed.
export async function* chat(body: object, signal: AbortSignal): AsyncGenerator<ChatPart> {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await send(CHAT_PATH, { body: asked, signal, timeoutMs: CHAT_TIMEOUT_MS });
  yield { requestId: response.headers.get("weir-request-id") ?? "" };
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      const data = /^data: ?(.*?)\r?$/.exec(line)?.[1];
      if (data === undefined || data === "[DONE]") continue;
      yield chatPart(data);
    }
  }
}

// Parse an event. The cost keeps its digits, which a number may not hold.
export function chatPart(data: string): ChatPart {
  const event = JSON.parse(data);
  if (event.error) throw new CallFailed(200, event.error);
  const [choice] = event.choices ?? [];
  const picos = /"picos": ?(-?\d+)/.exec(data)?.[1];
  return {
    ...(choice?.delta?.content ? { delta: choice.delta.content } : {}),
    ...(choice?.finish_reason ? { finishReason: choice.finish_reason } : {}),
    ...(event.usage ? { usage: event.usage } : {}),
    ...(event.weir?.cost && picos
      ? { cost: { currency_code: event.weir.cost.currency_code, picos } }
      : {}),
    ...(event.weir?.timings?.[0] ? { timings: event.weir.timings[0] } : {}),
  };
}
