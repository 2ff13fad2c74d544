// Calls to the server: the RPCs of the contract in protobuf's JSON, files, and streamed chats.

import type { MessageJsonType, DescMessage } from "@bufbuild/protobuf";
import type { AdminService } from "./gen/weir/v1/admin_service_pb.js";
import type { BillingService } from "./gen/weir/v1/billing_service_pb.js";
import type { InferenceService } from "./gen/weir/v1/inference_service_pb.js";
import type { ReceiptService } from "./gen/weir/v1/receipt_service_pb.js";
import {
  ANONYMOUS,
  BY_COOKIE,
  authenticated,
  byKey,
  choose,
  chosenOrganization,
  forget,
  holdSession,
  storedKey,
} from "./credentials.js";
import type { Authentication } from "./credentials.js";
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

// The permissions of the signed-in key, or of a person in one of its organizations.
export interface Session {
  keyPrefix: string;
  organizationId: string;
  currencyCode: string;
  scopes: string[];
  isOperator: boolean;
  calls: Name[];
  person: Person | null; // null for an API key
}

export interface Membership {
  id: string; // of the organization
  name: string;
  role: string;
}

export interface Person {
  email: string;
  displayName: string;
  expireTime: string;
  organizations: Membership[];
}

export interface Provider {
  name: string;
  title: string;
}

// Nobody is signed in. `isEnded`: there was a session, which is not valid any more.
export interface SignedOut {
  providers: Provider[];
  isEnded: boolean;
}

interface Detail {
  "@type": string;
  reason?: string;
  retryDelay?: string;
  links?: { url?: string; description?: string }[];
  fieldViolations?: { field?: string; description?: string }[];
  violations?: { type?: string; description?: string }[];
}

const TIMEOUT_MS = 40_000; // reports may take 30 s
// Calls that read months of usage.
const LONG_TIMEOUT_MS = 310_000;
const LONG = new Set<Name>([
  "AdminService/PreviewQuota",
  "AdminService/SimulatePrices",
  "BillingService/CloseMonth",
  "BillingService/VerifyMonth",
]);

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
    by = authenticated(),
    body,
    signal,
    timeoutMs = TIMEOUT_MS,
  }: { by?: Authentication; body?: unknown; signal?: AbortSignal; timeoutMs?: number } = {},
): Promise<globalThis.Response> {
  const { headers, credentials } = by;
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

const SESSION = "api/session";

// Permissions of a key. Throws CallFailed.
export async function sessionOfKey(key: string): Promise<Session> {
  const found = await (await send(SESSION, { by: byKey(key) })).json();
  return { ...found, person: null };
}

// The session of the browser's cookie, or the ways to sign in. Throws CallFailed.
export async function sessionOfCookie(): Promise<Session | Person | SignedOut> {
  let found;
  try {
    found = await (await send(SESSION, { by: BY_COOKIE })).json();
  } catch (error) {
    if (!(error instanceof CallFailed) || error.httpStatus !== 401) throw error;
    return { ...(await (await send(SESSION, { by: ANONYMOUS })).json()), isEnded: true };
  }
  if (found.providers) return { ...found, isEnded: false };
  const { csrf, ...person } = found as Person & { csrf: string };
  const own = person.organizations;
  const chosen = own.find(({ id }) => id === chosenOrganization()) ?? own[0];
  holdSession(csrf);
  if (!chosen) return person;
  choose(chosen.id);
  return { ...(await (await send(SESSION)).json()), person };
}

// Whom a link or an invitation would sign in, and of which organizations.
export interface Offer {
  email: string;
  displayName?: string;
  organizations: string[];
}

// Ask whom a link (`secret`) or an invitation (`token`) would sign in. Throws CallFailed.
export async function offerOf(by: { secret: string } | { token: string }): Promise<Offer> {
  return (await send("api/offer", { by: ANONYMOUS, body: by })).json();
}

// Begin a session with the secret of a link. Throws CallFailed.
export async function useLink(secret: string): Promise<void> {
  await send("api/link", { by: BY_COOKIE, body: { secret } });
  forget(); // a key of this tab
}

// Become a member with an invitation, and begin a session. Throws CallFailed.
export async function acceptInvitation(token: string, displayName: string): Promise<void> {
  await send("api/invitation", { by: BY_COOKIE, body: { token, displayName } });
  forget();
}

// End the session, or forget the key. Throws CallFailed.
export async function endSession(): Promise<void> {
  if (storedKey() === null) await send("api/sign-out", { body: {} });
  forget();
}

// RPC of the contract. Throws CallFailed.
export async function call<Call extends Name>(
  name: Call,
  request: Request<Call>,
  signal?: AbortSignal,
): Promise<Response<Call>> {
  const timeoutMs = LONG.has(name) ? LONG_TIMEOUT_MS : TIMEOUT_MS;
  const asked = { body: request, timeoutMs, ...(signal ? { signal } : {}) };
  return (await send(`api/${name}`, asked)).json();
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
const CHAT_TOKEN_LIFETIME = "60s"; // from its creation to the start of the chat

// Stream a chat over the HTTP API: with the key, or with a client token of the session, since the
// API takes no cookies. Throws CallFailed.
export async function* chat(
  body: { model: string },
  signal: AbortSignal,
): AsyncGenerator<ChatPart> {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const key = storedKey() ?? (await chatToken(body.model, signal));
  const response = await send(CHAT_PATH, {
    by: byKey(key),
    body: asked,
    signal,
    timeoutMs: CHAT_TIMEOUT_MS,
  });
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

// Token for one chat.
async function chatToken(model: string, signal: AbortSignal): Promise<string> {
  const request = { call: "chat/completions", model, lifetime: CHAT_TOKEN_LIFETIME };
  return (await call("InferenceService/CreateClientToken", request, signal)).value ?? "";
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
