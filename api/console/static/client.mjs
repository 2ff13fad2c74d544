// Calls to the server. The key is in this tab's sessionStorage, not in a cookie, until sign-out.

const KEY = "weir.key";
const TIMEOUT_MS = 40000; // reports may take 30 s

// Failed call; `httpStatus` is 0 if the server could not be reached.
export class CallFailed extends Error {
  constructor(httpStatus, status) {
    super(status.message || "the server did not give a reason");
    this.httpStatus = httpStatus;
    this.details = status.details ?? [];
  }

  // Error detail by its type's name: ErrorInfo, BadRequest, RetryInfo.
  detail(name) {
    return this.details.find((each) => String(each["@type"]).endsWith(`.${name}`));
  }

  get reason() {
    return this.detail("ErrorInfo")?.reason ?? "";
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY);
}

export function remember(key) {
  sessionStorage.setItem(KEY, key);
}

export function forget() {
  sessionStorage.removeItem(KEY);
}

async function send(path, key, body, signal) {
  const limits = [AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])];
  const options = { headers: { authorization: `Bearer ${key}` }, credentials: "omit", cache: "no-store", redirect: "error", signal: AbortSignal.any(limits) };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) }), options.headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new CallFailed(0, { message: error.name === "TimeoutError" ? "the server did not answer in time" : "the server cannot be reached" });
  }
  if (!response.ok) throw new CallFailed(response.status, await response.json().catch(() => ({ message: `HTTP ${response.status}` })));
  return response;
}

// Permissions of a key. Throws CallFailed.
export async function session(key) {
  return (await send("session", key)).json();
}

// RPC of the contract, in protobuf's JSON. Throws CallFailed.
export async function call(name, request = {}, signal = undefined) {
  return (await send(name, storedKey() ?? "", request, signal)).json();
}

// File returned by an RPC, with its name. Throws CallFailed.
export async function file(name, request) {
  const response = await send(name, storedKey() ?? "", request);
  const match = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "");
  return { name: match?.[1] ?? "file", content: await response.blob() };
}

// Content of a field of bytes.
export function blobOf(content = "") {
  return new Blob([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))]);
}

// Save a file in the browser's downloads.
export function save(name, content) {
  const url = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
