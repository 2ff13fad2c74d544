// The calls to the server. The key lives in this tab's sessionStorage and in no cookie; signing out forgets it.

const KEY = "weir.key";
const TIMEOUT_MS = 40000; // the server gives a report half a minute

// What the server refused, or that it could not be reached: `httpStatus` is 0 then.
export class CallFailed extends Error {
  constructor(httpStatus, status) {
    super(status.message || "the server said nothing of why");
    this.httpStatus = httpStatus;
    this.details = status.details ?? [];
  }

  // A detail by the end of its type: ErrorInfo, BadRequest, RetryInfo.
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

// What a key is good for. Throws CallFailed.
export async function session(key) {
  return (await send("session", key)).json();
}

// One call of the contract, in protobuf's JSON. Throws CallFailed.
export async function call(name, request = {}, signal = undefined) {
  return (await send(name, storedKey() ?? "", request, signal)).json();
}

// The file that a call gives, with its name. Throws CallFailed.
export async function file(name, request) {
  const response = await send(name, storedKey() ?? "", request);
  const told = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "");
  return { name: told?.[1] ?? "file", content: await response.blob() };
}

// Give a file to the browser's downloads.
export function save(name, content) {
  const url = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
