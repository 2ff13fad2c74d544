/** Verification of receipts that `weir receipt export` wrote, offline, with public keys alone. */

import { createHash, createPublicKey, verify } from "node:crypto";

const VERSION_MAX = 4;
const IDS = ["organization_id", "project_id", "api_key_id", "request_id"] as const;
const COUNTS = [
  "part",
  "input_token_count",
  "cached_input_token_count",
  "billed_token_count",
  "embedding_token_count",
] as const;
const NUMBERS = ["price_version", "cost_picos", "admitted_at_us", "settled_at_us", "sequence"];
const TIMES = [
  "ttft_us",
  "tokens_per_second_milli",
  "itl_p50_us",
  "itl_p99_us",
  "itl_max_us",
  "client_stall_us",
];
const TEXTS = ["currency_code", "model", "outcome"] as const;
const KEY_PREFIX = Buffer.from("302a300506032b6570032100", "hex"); // of Ed25519, in DER

/** Kind of problem with a receipt. */
export type ReceiptFault =
  | "unreadable"
  | "version_unknown"
  | "altered"
  | "end_user_differs"
  | "labels_differ"
  | "not_signed"
  | "key_unknown"
  | "signature_wrong";

/** Thrown by `verifyReceipt`; `fault` is the kind of problem, and the message describes it. */
export class ReceiptInvalid extends Error {
  constructor(
    readonly fault: ReceiptFault,
    message: string,
  ) {
    super(message);
    this.name = "ReceiptInvalid";
  }
}

/** A JSON value whose numbers are text: some are larger than a `number` can be. */
type Json = string | boolean | null | readonly Json[] | { readonly [name: string]: Json };
type Fields = Readonly<Record<string, Json>>;

/**
 * Verifies one receipt, a line of `weir receipt export`: its content, and the end user and labels
 * beside it, are unaltered, and one of the keys signed it.
 *
 * `publicKeys` are the 32 bytes of each key by its id, from `weir receipt keys --json`. Throws
 * `ReceiptInvalid` with the reason.
 */
export function verifyReceipt(line: string, publicKeys: ReadonlyMap<string, Uint8Array>): void {
  const receipt = parsed(line);
  const name = `receipt ${text(receipt, "sequence")} of project ${text(receipt, "project_id")}`;
  const version = Number(receipt["version"]);
  if (!(version >= 1 && version <= VERSION_MAX)) {
    throw new ReceiptInvalid(
      "version_unknown",
      `${name} has version ${version}, and this client knows 1 to ${VERSION_MAX}: update it`,
    );
  }
  if (!isHash(receipt, "end_user_hash", endUserHash(receipt))) {
    throw new ReceiptInvalid(
      "end_user_differs",
      `${name} is not for end_user ${JSON.stringify(receipt["end_user"])}:` +
        " the name or its salt was altered",
    );
  }
  if (!isHash(receipt, "labels_hash", labelsHash(receipt))) {
    throw new ReceiptInvalid(
      "labels_differ",
      `${name} does not have labels ${JSON.stringify(receipt["labels"])}:` +
        " one of them or their salt was altered",
    );
  }
  const hash = hex(receipt, "hash");
  if (!sha256(encoded(receipt, version)).equals(hash)) {
    throw new ReceiptInvalid("altered", `${name} was altered: its content does not match its hash`);
  }
  const keyId = text(receipt, "key_id");
  if (keyId === "") {
    throw new ReceiptInvalid("not_signed", `${name} is not signed`);
  }
  const key = publicKeys.get(keyId);
  if (key === undefined) {
    throw new ReceiptInvalid(
      "key_unknown",
      `${name} is signed by key ${keyId}, which is not among the public keys`,
    );
  }
  const signed = Buffer.concat([Buffer.from("weir.receipt.batch.v1\n"), root(receipt, hash)]);
  const der = Buffer.concat([KEY_PREFIX, key]);
  const publicKey = createPublicKey({ key: der, format: "der", type: "spki" });
  if (!verify(null, signed, publicKey, hex(receipt, "signature"))) {
    throw new ReceiptInvalid(
      "signature_wrong",
      `${name} is not signed by key ${keyId}: its signature or path was altered,` +
        " or another key made it",
    );
  }
}

function parsed(line: string): Fields {
  // Strings are matched first, so that only numbers outside of them become text.
  const exact = line.replace(/"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?/g, (each) =>
    each.startsWith('"') ? each : `"${each}"`,
  );
  let receipt: Json;
  try {
    receipt = JSON.parse(exact) as Json;
  } catch (error) {
    throw new ReceiptInvalid("unreadable", `the line is not JSON: ${String(error)}`);
  }
  if (!isFields(receipt)) {
    throw new ReceiptInvalid("unreadable", "a receipt is a JSON object");
  }
  return receipt;
}

function isFields(value: Json | undefined): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function text(fields: Fields, name: string): string {
  const value = fields[name];
  if (typeof value !== "string") {
    throw new ReceiptInvalid("unreadable", `${name}: must be a text or a whole number`);
  }
  return value;
}

function hex(fields: Fields, name: string, value = text(fields, name)): Buffer {
  if (!/^(?:[0-9a-fA-F]{2})*$/.test(value)) {
    throw new ReceiptInvalid("unreadable", `${name}: must be hexadecimal`);
  }
  return Buffer.from(value, "hex");
}

function encoded(receipt: Fields, version: number): Buffer {
  const parts: Buffer[] = [Buffer.from(`weir.receipt.v${version}\n`)];
  for (const name of IDS) {
    parts.push(hex(receipt, name, text(receipt, name).replaceAll("-", "")));
  }
  const reasoning = version > 1 ? ["reasoning_token_count"] : [];
  for (const name of [...COUNTS, ...reasoning, ...NUMBERS]) {
    parts.push(number(text(receipt, name)));
  }
  parts.push(hex(receipt, "previous_hash"));
  const timings = receipt["timings"];
  const hashes = ["end_user_hash", "labels_hash"].filter((name) => name in receipt);
  if (version > 3) {
    const has = ["timings", "end_user_hash", "labels_hash"].map((name) => name in receipt);
    parts.push(number(has.reduce((sum, isThere, bit) => sum + (isThere ? 2 ** bit : 0), 0)));
  }
  for (const name of isFields(timings) ? TIMES : []) {
    parts.push(number(text(timings as Fields, name)));
  }
  parts.push(...hashes.map((name) => hex(receipt, name)));
  parts.push(...TEXTS.flatMap((name) => sized(text(receipt, name))));
  return Buffer.concat(parts);
}

function number(value: string | number): Buffer {
  const bytes = Buffer.alloc(8);
  try {
    bytes.writeBigInt64BE(BigInt(value));
  } catch {
    throw new ReceiptInvalid("unreadable", `${value}: must be a whole number of 64 bits`);
  }
  return bytes;
}

function sized(value: string): Buffer[] {
  const bytes = Buffer.from(value);
  return [number(bytes.length), bytes];
}

/** Returns the hash of the end user that is beside the receipt; undefined if there is none. */
function endUserHash(receipt: Fields): Buffer | undefined {
  if (!("end_user" in receipt || "end_user_salt" in receipt)) {
    return undefined;
  }
  const name = Buffer.from(optional(receipt, "end_user"));
  return sha256(Buffer.from("weir.receipt.end_user.v1\n"), salt(receipt, "end_user"), name);
}

/** Returns the hash of the labels that are beside the receipt; undefined if there are none. */
function labelsHash(receipt: Fields): Buffer | undefined {
  if (!("labels" in receipt || "labels_salt" in receipt)) {
    return undefined;
  }
  const labels = isFields(receipt["labels"]) ? Object.entries(receipt["labels"]) : [];
  // By bytes: the order of UTF-16 differs beyond the basic plane.
  labels.sort(([one], [other]) => Buffer.compare(Buffer.from(one), Buffer.from(other)));
  const texts = labels.flatMap(([key, value]) => [...sized(key), ...sized(String(value))]);
  const content = [number(labels.length), ...texts];
  return sha256(Buffer.from("weir.receipt.labels.v1\n"), salt(receipt, "labels"), ...content);
}

function salt(receipt: Fields, name: string): Buffer {
  return hex(receipt, `${name}_salt`, optional(receipt, `${name}_salt`));
}

function optional(receipt: Fields, name: string): string {
  return name in receipt ? text(receipt, name) : "";
}

function isHash(receipt: Fields, name: string, found: Buffer | undefined): boolean {
  return found === undefined || found.equals(hex(receipt, name, optional(receipt, name)));
}

/** Computes the Merkle root that was signed, along the receipt's path. */
function root(receipt: Fields, hash: Buffer): Buffer {
  const path = receipt["path"];
  let at = hash;
  for (const step of Array.isArray(path) ? (path as readonly Json[]) : []) {
    const sibling = hex(receipt, "path", String(step).slice(1));
    const pair = String(step).startsWith("L") ? [sibling, at] : [at, sibling];
    at = sha256(Buffer.from([1]), ...pair);
  }
  return at;
}

function sha256(...parts: readonly Buffer[]): Buffer {
  const hash = createHash("sha256");
  parts.forEach((part) => hash.update(part));
  return hash.digest();
}
