/** Tests of the verification of receipts with the test vectors of the documentation. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { ReceiptInvalid, verifyReceipt } from "../src/index.js";

const ROOT = new URL("../../../../", import.meta.url); // from dist/tests
const LINES = read("docs/receipts_example.jsonl").trimEnd().split("\n");
const { keys } = JSON.parse(read("docs/receipts_example_keys.json")) as {
  keys: { key_id: string; public_key: string }[];
};
const KEYS = new Map(keys.map((key) => [key.key_id, Buffer.from(key.public_key, "hex")]));
const NAMED = LINES[8] ?? "";

function read(path: string): string {
  return readFileSync(new URL(path, ROOT), "utf8");
}

function refuses(line: string, fault: string, says: string): void {
  assert.throws(
    () => verifyReceipt(line, KEYS),
    (error) =>
      error instanceof ReceiptInvalid && error.fault === fault && error.message.includes(says),
    `${fault}: ${line}`,
  );
}

test("verifies-receipts", () => {
  const versions = LINES.map((line) => (JSON.parse(line) as { version: number }).version);
  assert.deepEqual(new Set(versions), new Set([1, 2, 3, 4]));
  for (const line of LINES) {
    if (line.includes('"key_id":""')) {
      refuses(line, "not_signed", "is not signed");
    } else {
      verifyReceipt(line, KEYS);
    }
  }

  const nameless = NAMED.replace(/,"end_user":.*}$/, "}");
  assert.ok(!nameless.includes("4711"));
  verifyReceipt(nameless, KEYS);
});

test("names-altered-receipts", () => {
  const faults = JSON.parse(read("sdk/receipt_faults.json")) as Record<string, string>[];
  for (const { was = "", now = "", fault = "", says = "" } of faults) {
    assert.ok(NAMED.includes(was), was);
    refuses(NAMED.replace(was, now), fault, says);
  }

  refuses(NAMED.replace('"version":4', '"version":5'), "version_unknown", "1 to 4: update it");
  for (const value of ["9223372036854775808", '"x"', '"-"', "1.5", "null"]) {
    refuses(NAMED.replace('"part":0', `"part":${value}`), "unreadable", "whole number");
  }
  refuses(NAMED.slice(1), "unreadable", "not JSON");
  refuses("[]", "unreadable", "a JSON object");
});
