/** Current waits of the tests' clients, for the message of a test that times out. */

import { after } from "node:test";
import { GenerationStream, WeirClient } from "../src/index.js";

const EXIT_MS = 10_000; // after the last test: by then whatever is still alive has been left behind
const waiting = new Map<symbol, () => string>();

/** A promise under a name, for as long as it is pending. */
export async function waitingFor<Value>(what: () => string, value: Promise<Value>): Promise<Value> {
  const key = Symbol();
  waiting.set(key, what);
  try {
    return await value;
  } finally {
    waiting.delete(key);
  }
}

/** Runs a test for at most so long. Throws an Error that names what it was waiting for then. */
export async function inTime(milliseconds: number, body: () => Promise<void>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => {
      const what = [...waiting.values()].map((each) => each()).join("; ") || "nothing of a client";
      reject(new Error(`out of time after ${milliseconds} ms, waiting for: ${what}`));
    }, milliseconds);
  });
  await Promise.race([body(), late]).finally(() => clearTimeout(timer));
}

/** Lets every call of these methods be seen. */
function watch(
  prototype: object,
  names: readonly string[],
  describe: (self: never) => string,
): void {
  for (const name of names) {
    const original = Reflect.get(prototype, name) as (...given: unknown[]) => Promise<unknown>;
    Reflect.set(prototype, name, function (this: never, ...given: unknown[]) {
      return waitingFor(() => `${name} of ${describe(this)}`, original.apply(this, given));
    });
  }
}

watch(
  WeirClient.prototype,
  [
    "countTokens",
    "quote",
    "quoteEmbed",
    "embed",
    "listModels",
    "getQuota",
    "getRestrictions",
    "getGeneration",
    "close",
  ],
  (client: WeirClient) => `the client of ${client.address}`,
);
watch(GenerationStream.prototype, ["next", "update", "close"], (generation: GenerationStream) => {
  const { requestId, resumeCount, admitted, partial } = generation;
  const state = admitted ? "admitted" : "not admitted";
  return `${requestId} (${state}, ${partial.tokenIds.length} tokens, resumed ${resumeCount} times)`;
});

after(() => {
  setTimeout(() => {
    console.error(`STILL ALIVE: ${process.getActiveResourcesInfo().join(", ")}`);
    process.exit(1);
  }, EXIT_MS).unref();
});
