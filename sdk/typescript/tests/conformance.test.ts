/**
 * Tests of the promises in `sdk/conformance.json` against a running server. Its address and keys
 * come from the environment.
 */

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { getEventListeners, once } from "node:events";
import { readFileSync } from "node:fs";
import { connect, createServer, type Server, type Socket } from "node:net";
import { test } from "node:test";
import type { DescMessage, Message as ProtoMessage } from "@bufbuild/protobuf";
import { isReflectMessage, reflect, type ReflectMessage } from "@bufbuild/protobuf/reflect";
import { status } from "@grpc/grpc-js";
import { EmbedRequestSchema, StartFrameSchema } from "../src/gen/weir/v1/inference_service_pb.js";
import {
  Aborted,
  AlreadyExists,
  DeadlineExceeded,
  type Delta,
  FailedPrecondition,
  type GenerationStream,
  type GenerateOptions,
  IncompleteGeneration,
  InvalidRequest,
  type Message,
  Money,
  NotFound,
  QuotaExceeded,
  type Tool,
  type ToolCallDelta,
  Unauthenticated,
  Unavailable,
  type UsageUpdate,
  WeirClient,
} from "../src/index.js";
import { answering, away, delta, finished, later, ScriptedServer } from "./scripted.js";
import { inTime, waitingFor } from "./waiting.js";

const MODEL = environment("WEIR_TEST_MODEL");
const TOOL_MODEL = environment("WEIR_TEST_TOOL_MODEL"); // whose chat template has a place for tools
const ENCODER = environment("WEIR_TEST_ENCODER");
const ADDRESS = environment("WEIR_ADDRESS");
// Address of a server whose replay buffer keeps some 1,600 tokens, for 20 s.
const TIGHT_ADDRESS = environment("WEIR_TEST_TIGHT_ADDRESS");
// Key of an organization with 40 tokens per month.
const LIMITED_KEY = environment("WEIR_TEST_LIMITED_KEY");
const INPUT_PICOS = 150_000n; // the test server's prices
const CACHED_PICOS = 15_000n;
const OUTPUT_PICOS = 600_000n;
const EMBEDDING_PICOS = 20_000n;
const PATIENCE_MS = 60_000;

const LONG: GenerateOptions = { tokenIds: [7, 8, 9, 10], maxOutputTokens: 3000, ignoreEos: true };
const RESUMED: GenerateOptions = { ...LONG, maxOutputTokens: 3000 };
const KEPT: GenerateOptions = { ...LONG, keepOnDisconnectMs: 500_000 };
const SHORT: GenerateOptions = { tokenIds: [7, 8, 9, 10], maxOutputTokens: 12, ignoreEos: true };

function environment(name: string): string {
  const value = process.env[name];
  assert.ok(value, `${name} is not set: run these tests as tests/sdk/test_typescript.py does`);
  return value;
}

/** A test with a client of its own. */
function promise(id: string, body: (client: WeirClient) => Promise<void>): void {
  test(id, () =>
    inTime(PATIENCE_MS, async () => {
      await using client = new WeirClient();
      await body(client);
    }),
  );
}

/** Looks again and again, until what is seen holds; the test's own limit is the only one. */
async function until<Value>(
  look: () => Promise<Value>,
  holds: (value: Value) => boolean,
): Promise<Value> {
  for (;;) {
    const value = await look();
    if (holds(value)) return value;
    const seen = (): string =>
      JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? `${each}` : each));
    await waitingFor(
      () => `another answer than ${seen()} (${holds})`,
      new Promise((resolve) => setTimeout(resolve, 20)),
    );
  }
}

promise("streams-in-order", async (client) => {
  const generation = client.generate(MODEL, SHORT);
  const seqs: number[] = [];
  let text = "";
  let tokenCount = 0;
  for await (const delta of generation) {
    seqs.push(delta.seq);
    text += delta.text;
    tokenCount += delta.tokenIds.length;
  }
  const result = await generation.result();
  assert.deepEqual(
    seqs,
    Array.from(seqs, (_, index) => index + 1),
  );
  assert.equal(text, result.text);
  assert.equal(tokenCount, 12);
  assert.equal(result.usage.deliveredTokenCount, 12);
  assert.equal(result.finishReason, "LENGTH");
  assert.equal(result.admitted?.inputTokenCount, 4);

  // Two readers at once: each delta goes to one of them, and both see the end.
  const shared = client.generate(MODEL, LONG);
  const read = async (): Promise<Delta[]> => {
    const deltas: Delta[] = [];
    for await (const delta of shared) deltas.push(delta);
    return deltas;
  };
  const [one, other, { tokenIds }] = await Promise.all([
    read(),
    read(),
    read().then(() => shared.result()),
  ]);
  assert.equal(tokenIds.length, 3000);
  assert.ok(one.length + other.length <= 3000);
});

promise("reports-the-exact-bill", async (client) => {
  const result = await client.complete(MODEL, SHORT);
  const { inputTokenCount, cachedInputTokenCount, billedTokenCount } = result.usage;
  const uncached = BigInt(inputTokenCount - cachedInputTokenCount);
  const expected =
    uncached * INPUT_PICOS +
    BigInt(cachedInputTokenCount) * CACHED_PICOS +
    BigInt(billedTokenCount) * OUTPUT_PICOS;
  assert.equal(result.cost.picos, expected);
  const recorded = await client.getGeneration(result.requestId);
  assert.equal(recorded.state, "SETTLED");
  assert.deepEqual(recorded.usage, result.usage);
  assert.deepEqual(recorded.cost, result.cost);
  assert.equal(`${result.cost}`, "0.0000078 USD");
});

promise("runs-many-at-once", async (client) => {
  const alone = await client.complete(MODEL, { ...SHORT, tokenIds: [20, 21, 22] });
  const prompts = Array.from({ length: 20 }, (_, index) => [20 + index, 21, 22]);
  const results = await Promise.all(
    prompts.map((tokenIds) => client.complete(MODEL, { ...SHORT, tokenIds })),
  );
  assert.equal(new Set(results.map((result) => result.requestId)).size, 20);
  assert.deepEqual(results[0]?.tokenIds, alone.tokenIds);
  for (const result of results) assert.equal(result.usage.deliveredTokenCount, 12);
});

promise("leaving-the-loop-cancels", async (client) => {
  const generation = client.generate(MODEL, LONG);
  for await (const delta of generation) if (delta.seq === 3) break;
  const recorded = await until(
    () => client.getGeneration(generation.requestId),
    ({ state }) => state === "SETTLED",
  );
  assert.equal(recorded.outcome, "CANCELLED");
  const { finishReason, usage } = await generation.result();
  assert.equal(finishReason, "CANCELLED");
  assert.deepEqual(usage, recorded.usage);
  assert.ok(usage.deliveredTokenCount >= 3 && usage.deliveredTokenCount < 3000);
});

promise("cancels-from-outside", async (client) => {
  const controller = new AbortController();
  const generation = client.generate(MODEL, { ...LONG, signal: controller.signal });
  const first = await generation[Symbol.asyncIterator]().next();
  assert.equal(first.value?.seq, 1);
  controller.abort();
  await assert.rejects(generation.result(), { name: "AbortError" });
  await assert.rejects(generation.events().next(), { name: "AbortError" });
  const { usage, tokenIds } = generation.partial;
  assert.equal(usage?.deliveredTokenCount, tokenIds.length);

  const aborted = client.generate(MODEL, { ...LONG, signal: controller.signal });
  await assert.rejects(aborted.result(), { name: "AbortError" });
  await assert.rejects(client.listModels({ signal: controller.signal }), { name: "AbortError" });
  const reason = new Error("closed by its user");
  const own = client.complete(MODEL, { ...LONG, signal: AbortSignal.abort(reason) });
  await assert.rejects(own, reason);

  const lasting = new AbortController(); // one for many requests
  await client.complete(MODEL, { ...SHORT, signal: lasting.signal });
  assert.deepEqual(getEventListeners(lasting.signal, "abort"), []);

  await using server = await new ScriptedServer(async (stream) => {
    const { requestId } = (await stream.read())!;
    stream.send(delta(requestId, 1, "a"));
    assert.equal((await stream.read())?.kind.case, "cancel");
    stream.send(finished(requestId, 1));
  }).open();
  await using other = new WeirClient({ address: server.address });
  const deltas = other.generate(MODEL, SHORT)[Symbol.asyncIterator]();
  await deltas.next();
  const waiting = deltas.next(); // for output that never comes
  await waitingFor(() => "return of an iterator that waits", deltas.return());
  assert.deepEqual(await waiting, { done: true, value: undefined });
});

promise("times-out", async (client) => {
  const generation = client.generate(MODEL, { ...LONG, timeoutMs: 400 });
  await assert.rejects(generation.result(), (error: unknown) => {
    assert.ok(error instanceof DeadlineExceeded);
    assert.equal(
      error.partial?.usage?.deliveredTokenCount ?? 0,
      error.partial?.usage ? error.partial.tokenIds.length : 0,
    );
    return true;
  });
});

promise("refuses-a-bad-key", async () => {
  await using stranger = new WeirClient({ apiKey: "weir_nobody" });
  await assert.rejects(stranger.complete(MODEL, SHORT), Unauthenticated);
  await assert.rejects(stranger.listModels(), Unauthenticated);
});

promise("names-an-unknown-model", async (client) => {
  await assert.rejects(client.complete("nothing", SHORT), NotFound);
  await assert.rejects(client.countTokens("nothing", { text: "x" }), NotFound);
});

promise("names-the-wrong-field", async (client) => {
  await assert.rejects(client.complete(MODEL, { ...SHORT, temperature: 9 }), (error: unknown) => {
    assert.ok(error instanceof InvalidRequest);
    assert.match(error.fieldViolations.map(({ field }) => field).join(), /temperature/);
    return true;
  });
  assert.throws(() => client.generate(MODEL, { text: "a", tokenIds: [7] }), InvalidRequest);
});

promise("reports-the-limit-that-was-hit", async () => {
  await using limited = new WeirClient({ apiKey: LIMITED_KEY });
  await assert.rejects(
    limited.complete(MODEL, { tokenIds: Array.from({ length: 50 }, () => 7), maxOutputTokens: 5 }),
    (error) => {
      assert.ok(error instanceof QuotaExceeded);
      assert.equal(error.quota?.limit, 40n);
      assert.equal(error.quota?.dimension, "tokens-per-month");
      assert.equal(error.retryHelps, false);
      return true;
    },
  );
});

promise("never-bills-twice", async (client) => {
  const requestId = randomUUID();
  const first = await client.complete(MODEL, { ...SHORT, requestId });
  await assert.rejects(client.complete(MODEL, { ...SHORT, requestId }), (error: unknown) => {
    assert.ok(error instanceof AlreadyExists);
    assert.equal(error.reason, "REQUEST_SETTLED");
    assert.deepEqual(error.partial?.usage, first.usage);
    return true;
  });
});

const WRONG_OPTIONS = {
  maxTokens: 3,
  temperature: "hot",
  stop: [1],
  maxCost: 0.05,
  tier: "cheap",
  labels: { a: 1 },
  timeoutMs: "5 s",
  keepOnDisconnectMs: "30",
  prefetchTokens: 2.5,
  startTimeoutMs: 0,
  text: 5,
};

promise("refuses-what-it-does-not-know", async () => {
  await using server = await new ScriptedServer(answering("a")).open();
  await using client = new WeirClient({ address: server.address });
  const refused = (call: () => unknown, field: string): void =>
    assert.throws(
      call,
      (error: unknown) =>
        error instanceof InvalidRequest && error.fieldViolations[0]?.field === field,
    );
  for (const [name, value] of Object.entries(WRONG_OPTIONS)) {
    refused(
      () => client.generate(MODEL, { ...(name === "text" ? {} : { prompt: "Hi" }), [name]: value }),
      name,
    );
  }
  refused(() => client.generate(MODEL, "Hi" as unknown as GenerateOptions), "options");
  for (const [prompt, field] of [
    [["Hi"], "messages[0]"],
    [5, "prompt"],
    [[{ role: "user", content: [] }], "messages[0].content"],
  ]) {
    refused(
      () => client.generate(MODEL, { prompt } as unknown as GenerateOptions),
      field as string,
    );
  }
  await assert.rejects(
    client.embed(MODEL, "a", { truncation: true } as object),
    /truncation: no such option/,
  );
  const tooLarge = 2n ** 70n; // sent all the same, it would end the shared stream
  refused(() => client.attach(randomUUID(), { afterSeq: tooLarge } as object), "attach");
  const unsent = new WeirClient();
  const running = unsent.generate(MODEL, LONG);
  await running[Symbol.asyncIterator]().next();
  for (const wrong of [{ maxOutputTokens: tooLarge }, { maxOutputTokens: "5" }, { maxTokens: 5 }]) {
    await assert.rejects(running.update(wrong as object), InvalidRequest);
  }
  assert.equal((await running.update({ maxOutputTokens: 2999 })).maxOutputTokens, 2999);
  await unsent.close();
  refused(() => client.attach(randomUUID(), { resumeS: 5 } as object), "resumeS");
  refused(() => new WeirClient({ adress: server.address } as object), "adress");
  await using secure = new WeirClient({ address: `https://${ADDRESS}`, maxRetries: 0 });
  await assert.rejects(secure.listModels(), /tls: false/);
  assert.deepEqual([server.streamCount, server.embeddings.length], [0, 0]);
});

promise("refuses-too-large-requests-itself", async () => {
  await using client = new WeirClient({ maxMessageBytes: 10_000 });
  const running = client.complete(MODEL, SHORT);
  assert.throws(() => client.generate(MODEL, { text: "x".repeat(20_000) }), {
    name: "InvalidRequest",
    reason: "MESSAGE_TOO_LARGE",
  });
  assert.equal((await running).usage.deliveredTokenCount, 12);
});

promise("keeps-response-formats", async (client) => {
  const jsonSchema = {
    type: "object",
    properties: { ok: { type: "boolean" } },
    required: ["ok"],
    additionalProperties: false,
  };
  const result = await client.complete(MODEL, {
    tokenIds: [7, 8, 9],
    maxOutputTokens: 200,
    jsonSchema,
  });
  if (result.finishReason === "STOP")
    assert.equal(typeof (JSON.parse(result.text) as { ok: unknown }).ok, "boolean");
  else assert.match(result.text, /^\s*\{/);
});

promise("names-the-stop", async (client) => {
  const asked = { tokenIds: [7, 8, 9], maxOutputTokens: 40, ignoreEos: true };
  const free = await client.complete(MODEL, asked);
  const stop = free.text.slice(3, 7);
  const stopped = await client.complete(MODEL, { ...asked, stop: ["never!", stop] });
  const stopTokenId = free.tokenIds[2]!;
  const ended = await client.complete(MODEL, { ...asked, stopTokenIds: [stopTokenId] });
  assert.deepEqual([free.stoppedBy, stopped.stoppedBy], [undefined, stop]);
  assert.equal(ended.choices[0]!.stoppedBy, stopTokenId);
});

promise("calls-tools", async (client) => {
  const parameters = {
    type: "object",
    properties: { ok: { type: "boolean" } },
    required: ["ok"],
    additionalProperties: false,
  };
  const tools: readonly Tool[] = [
    { name: "check", description: "Checks it.", parameters },
    { name: "other" },
  ];
  const stream = client.generate(TOOL_MODEL, {
    prompt: "Is it?",
    tools,
    toolChoice: { name: "check" },
    maxOutputTokens: 400,
  });
  const deltas: ToolCallDelta[] = [];
  for await (const delta of stream) deltas.push(...delta.toolCalls);
  const result = await stream.result();
  assert.equal(result.finishReason, "TOOL_CALLS");
  assert.equal(result.text, "");
  assert.equal(result.toolCalls.length, 1);
  const call = result.toolCalls[0]!;
  assert.deepEqual(result.choices[0]!.toolCalls, result.toolCalls);
  assert.equal(call.name, "check");
  assert.equal(typeof (JSON.parse(call.argumentsJson) as { ok: unknown }).ok, "boolean");
  assert.deepEqual(
    deltas.slice(0, 2).map(({ index, id, name }) => [index, id, name]),
    [
      [0, call.id, "check"],
      [0, "", ""],
    ],
  );
  assert.equal(deltas.map(({ argumentsJson }) => argumentsJson).join(""), call.argumentsJson);
  const talk: readonly Message[] = [
    { role: "user", content: "Is it?" },
    { role: "assistant", content: "", toolCalls: result.toolCalls },
    { role: "tool", content: "It is.", toolCallId: call.id },
  ];
  const after = await client.complete(TOOL_MODEL, {
    prompt: talk,
    tools,
    toolChoice: "none",
    maxOutputTokens: 2,
  });
  assert.deepEqual(after.toolCalls, []);
  await assert.rejects(
    client.complete(MODEL, { prompt: "Is it?", tools, maxOutputTokens: 2 }),
    (error) => {
      assert.ok(error instanceof InvalidRequest);
      assert.equal(error.details.fieldViolations[0]?.field, "tools");
      return true;
    },
  );
});

promise("counts-tools", async (client) => {
  const tools: readonly Tool[] = [
    {
      name: "check",
      description: "Checks it.",
      parameters: { type: "object", properties: { ok: {} } },
    },
    { name: "other" },
  ];
  const without = await client.countTokens(TOOL_MODEL, { prompt: "Is it?" });
  const shown = await client.countTokens(TOOL_MODEL, { prompt: "Is it?", tools });
  const { usage } = await client.complete(TOOL_MODEL, {
    prompt: "Is it?",
    tools,
    maxOutputTokens: 2,
  });
  assert.ok(without.inputTokenCount < shown.inputTokenCount);
  assert.equal(shown.inputTokenCount, usage.inputTokenCount);
  for (const refused of [
    client.countTokens(MODEL, { prompt: "Is it?", tools }),
    client.countTokens(TOOL_MODEL, { text: "Is it?", tools }),
  ]) {
    await assert.rejects(
      refused,
      (error: unknown) =>
        error instanceof InvalidRequest && error.fieldViolations[0]?.field === "tools",
    );
  }
  await assert.rejects(
    client.countTokens(TOOL_MODEL, { prompt: "Is it?", tool: "check" } as object),
    /tool: no such option/,
  );
  await assert.rejects(client.countTokens(TOOL_MODEL, {}), /exactly one of/);
});

promise("returns-choices-and-logprobs", async (client) => {
  const result = await client.complete(MODEL, {
    ...SHORT,
    choiceCount: 3,
    temperature: 1,
    seed: 5,
    topLogprobs: 2,
  });
  assert.deepEqual(
    result.choices.map(({ index }) => index),
    [0, 1, 2],
  );
  for (const choice of result.choices) {
    assert.equal(choice.tokenIds.length, 12);
    assert.deepEqual(
      choice.logprobs.map(({ chosen }) => chosen.tokenId),
      choice.tokenIds,
    );
    for (const { chosen, top } of choice.logprobs)
      assert.ok(chosen.logprob <= 0 && top.length === 2);
  }
  assert.equal(result.usage.billedTokenCount, 36);
});

promise("shows-running-usage", async (client) => {
  const updates: UsageUpdate[] = [];
  for await (const event of client.generate(MODEL, { ...SHORT, usageIntervalTokens: 4 }).events()) {
    if (event.type === "usage") updates.push(event);
  }
  const counts = updates.map(({ usage }) => usage.deliveredTokenCount);
  assert.ok(counts.length >= 1);
  assert.deepEqual(
    counts,
    [...counts].sort((one, other) => one - other),
  );
});

promise("looks-up", async (client) => {
  const models = await client.listModels();
  const price = models.find(({ name }) => name === MODEL)?.price;
  assert.equal(price?.outputPicosPerToken, OUTPUT_PICOS);
  assert.equal((await client.countTokens(MODEL, { text: "a pool" })).inputTokenCount > 0, true);
  const quote = await client.quote(MODEL, SHORT);
  assert.equal(quote.inputTokenCount, 4);
  assert.equal(quote.maxOutputTokenCount, 12);
  assert.ok(quote.wouldAdmit && quote.worstCaseCost.picos >= quote.expectedCost.picos);
  assert.deepEqual(await client.getQuota(), []);
  const {
    scopes,
    models: allowed,
    maxInputTokens,
    strictParameters,
    secretExpireTime,
  } = await client.getRestrictions();
  assert.deepEqual(
    [scopes.includes("inference"), allowed, maxInputTokens, strictParameters, secretExpireTime],
    [true, [], undefined, false, undefined],
  );
  await using limited = new WeirClient({ apiKey: LIMITED_KEY });
  assert.equal((await limited.getQuota(MODEL))[0]?.limitValue, 40n);
  await assert.rejects(client.getGeneration(randomUUID()), NotFound);
});

promise("reports-own-usage", async (client) => {
  const result = await client.complete(MODEL, SHORT);
  const report = await client.usage({ by: ["model"], model: MODEL });
  const project = await client.usage({ project: true, month: report.firstDay.slice(0, 7) });
  const [row] = report.rows;
  assert.deepEqual([row?.model, row?.day, report.rows.length], [MODEL, "", 1]);
  assert.equal(row?.cost.picos, report.total.cost.picos);
  assert.ok(report.total.cost.picos >= result.cost.picos);
  assert.ok(project.total.cost.picos >= report.total.cost.picos);
  assert.deepEqual([...new Set(project.rows.map(({ day }) => day))], [report.lastDay]);
  await assert.rejects(client.usage({ firstDay: "2026-01-01", lastDay: "2026-12-31" }), {
    message: /92 days/,
  });
  await assert.rejects(client.usage({ by: ["week"] } as never), /by: must be a list/);
});

promise("retries-what-was-not-taken", async () => {
  // A door that is shut at first: the first connections are closed before a byte went through.
  let closedCount = 0;
  const { address, server } = await gate(() => {
    closedCount += 1;
    return closedCount > 1;
  });
  await using client = new WeirClient({ address, maxRetries: 5 });
  const result = await client.complete(MODEL, SHORT);
  assert.equal(result.usage.deliveredTokenCount, 12);
  assert.ok(closedCount >= 2);
  server.close();
});

promise("stops-waiting-at-close", async () => {
  const hours = 3_600_000;
  await using server = await new ScriptedServer(async (stream) => {
    const frame = await stream.read();
    if (frame) stream.send(later(frame.requestId, hours));
    await stream.read();
  }).open();
  const client = new WeirClient({ address: server.address, retryWaitMaxMs: 2 * hours });
  const generation = client.generate(MODEL, { ...SHORT, timeoutMs: 2 * hours }).start();
  const ended = assert.rejects(generation.result(), { name: "Cancelled" });
  await until(
    async () => generation.partial,
    () => server.frames.length > 0,
  );
  await client.close();
  await waitingFor(() => "the end of a request whose client is closed", ended);
  await assert.rejects(client.listModels(), { name: "Cancelled" });
  await assert.rejects(client.complete(MODEL, { ...SHORT, timeoutMs: hours }), {
    name: "Cancelled",
  });
});

promise("raises-unavailable-without-a-server", async () => {
  const { address, server } = await gate(() => true);
  server.close();
  await once(server, "close");
  await using client = new WeirClient({ address, maxRetries: 0 });
  await assert.rejects(client.complete(MODEL, SHORT), Unavailable);
  await assert.rejects(client.listModels({ timeoutMs: 5000 }), Unavailable);
});

promise("makes-a-dropped-call-again", async () => {
  // gRPC's servers answer CANCELLED, without a word of ours, to what comes while they stop.
  await using server = await new ScriptedServer(
    async (stream) => {
      await stream.read();
      stream.abort(status.CANCELLED, "CANCELLED");
    },
    async (stream) => {
      await stream.read(); // and a proxy resets streams
      stream.abort(status.INTERNAL, "Received RST_STREAM with code 2 (Internal server error)");
    },
    answering("Hel", "lo"),
  ).open();
  server.refusals = [status.CANCELLED];
  await using client = new WeirClient({ address: server.address });
  assert.equal((await client.complete(MODEL, SHORT)).text, "Hello");
  assert.deepEqual(await client.listModels(), []);
  assert.deepEqual([server.streamCount, server.listCount], [3, 2]);
  const controller = new AbortController();
  const listing = client.listModels({ signal: controller.signal });
  controller.abort();
  await assert.rejects(listing, { name: "AbortError" }); // that was ourselves
});

promise("settles-at-close", async (client) => {
  const other = new WeirClient();
  const generations = [1, 2, 3].map(() => other.generate(MODEL, LONG).start());
  const firsts = generations.map((generation) => generation.events().next());
  await Promise.all(firsts);
  await other.close();
  for (const { requestId } of generations) {
    const recorded = await until(
      () => client.getGeneration(requestId),
      ({ state }) => state !== "RUNNING",
    );
    assert.ok(recorded.outcome === "CANCELLED" || recorded.state === "VOIDED");
  }
});

/** Generates 3000 tokens through a proxy that cuts so many connections, each at its first delta. */
async function streamedOverBreaks(
  cutCount: number,
  options = RESUMED,
): Promise<{ deltas: Delta[]; resumedCount: number; tokenIds: readonly number[] }> {
  const { address, server, cut } = await gate(() => true);
  await using client = new WeirClient({ address });
  const deltas: Delta[] = [];
  let resumedCount = 0;
  let cutsDone = 0;
  const generation = client.generate(MODEL, options);
  for await (const event of generation.events()) {
    if (event.type === "resumed") resumedCount += 1;
    if (event.type !== "delta") continue;
    deltas.push(event);
    if (cutsDone < cutCount && cutsDone === resumedCount) {
      cutsDone += 1;
      cut();
    }
  }
  const result = await generation.result();
  assert.equal(generation.resumeCount, resumedCount);
  assert.equal(deltas.map(({ text }) => text).join(""), result.text);
  const recorded = await client.getGeneration(generation.requestId);
  assert.deepEqual(recorded.usage, result.usage);
  assert.equal(recorded.usage.deliveredTokenCount, 3000);
  server.close();
  return { deltas, resumedCount, tokenIds: result.tokenIds };
}

promise("resumes-where-it-broke", async (client) => {
  const whole = await client.complete(MODEL, RESUMED);
  for (const cutCount of [1, 2]) {
    const { deltas, resumedCount, tokenIds } = await streamedOverBreaks(cutCount);
    assert.deepEqual(
      deltas.map(({ seq }) => seq),
      Array.from(deltas, (_, index) => index + 1),
    );
    assert.deepEqual(tokenIds, whole.tokenIds);
    assert.equal(resumedCount, cutCount);
  }
});

promise("resumes-before-the-first-token", async () => {
  let comeCount = 0;
  const { address, server, cut } = await gate(() => {
    comeCount += 1;
    return true;
  });
  await using client = new WeirClient({ address, maxRetries: 5 });
  const asked = client.generate(MODEL, SHORT).start();
  await until(
    async () => comeCount,
    (count) => count > 0,
  );
  cut();
  const atWork = client.generate(MODEL, SHORT);
  const events = atWork.events();
  const first = (await events.next()).value;
  assert.ok(first !== undefined && first.type !== "delta");
  cut();
  for (const generation of [asked, atWork]) {
    const { requestId, tokenIds } = await generation.result();
    assert.equal(tokenIds.length, 12);
    assert.equal((await client.getGeneration(requestId)).usage.deliveredTokenCount, 12);
  }
  server.close();
});

promise("bills-a-resumed-request-once", async () => {
  const { deltas } = await streamedOverBreaks(3);
  assert.equal(
    deltas.reduce((sum, { tokenIds }) => sum + tokenIds.length, 0),
    3000,
  );
});

promise("ends-with-its-connection-if-requested", async (direct) => {
  const { address, server, cut } = await gate(() => true);
  await using client = new WeirClient({ address });
  const generation = client.generate(MODEL, { ...LONG, keepOnDisconnectMs: 0 });
  const events = generation.events();
  while ((await events.next()).value?.type !== "delta");
  cut();
  await assert.rejects(generation.result(), (error: unknown) => {
    assert.ok(error instanceof IncompleteGeneration);
    assert.ok(error.partial !== undefined && error.partial.tokenIds.length > 0);
    return true;
  });
  const recorded = await until(
    () => direct.getGeneration(generation.requestId),
    ({ state }) => state !== "RUNNING",
  );
  assert.equal(recorded.outcome, "CANCELLED");
  server.close();
});

promise("cancels-while-the-connection-is-broken", async (direct) => {
  const { address, server, cut } = await gate(() => true);
  await using client = new WeirClient({ address });
  const generation = client.generate(MODEL, KEPT);
  const events = generation.events();
  while ((await events.next()).value?.type !== "delta");
  cut();
  generation.cancel();
  const { finishReason, usage, tokenIds } = await generation.result();
  assert.equal(finishReason, "CANCELLED");
  assert.equal(usage.deliveredTokenCount, tokenIds.length);
  assert.ok(tokenIds.length < 3000);
  assert.deepEqual((await direct.getGeneration(generation.requestId)).usage, usage);
  server.close();
});

promise("receives-what-another-client-started", async (one) => {
  await using other = new WeirClient();
  const started = one.generate(MODEL, { ...RESUMED, prefetchTokens: 50 });
  const beginning = started[Symbol.asyncIterator]();
  const first = (await beginning.next()).value;
  assert.ok(first !== undefined);
  const attached = other.attach(started.requestId, { afterSeq: first.seq });
  const deltas: Delta[] = [first];
  for await (const delta of attached) deltas.push(delta);
  assert.deepEqual(
    deltas.map(({ seq }) => seq),
    Array.from(deltas, (_, index) => index + 1),
  );
  assert.equal(
    deltas.reduce((sum, { tokenIds }) => sum + tokenIds.length, 0),
    3000,
  );
  await assert.rejects(started.result(), (error: unknown) => {
    assert.ok(error instanceof Aborted);
    assert.equal(error.reason, "ATTACHED_ELSEWHERE");
    return true;
  });
  // The output is kept for a while after the request's end.
  assert.equal((await one.attach(started.requestId).result()).tokenIds.length, 3000);
  await assert.rejects(one.attach(randomUUID()).result(), NotFound);
  await using stranger = new WeirClient({ apiKey: LIMITED_KEY });
  await assert.rejects(stranger.attach(started.requestId).result(), NotFound);
});

promise("leaves-nothing-behind-at-close", async (direct) => {
  const { address, server, cut } = await gate(() => true);
  const client = new WeirClient({ address });
  const kept = [1, 2, 3].map(() => client.generate(MODEL, KEPT).start());
  await Promise.all(kept.map((generation) => generation[Symbol.asyncIterator]().next()));
  cut();
  await client.close();
  for (const { requestId } of kept) {
    const recorded = await until(
      () => direct.getGeneration(requestId),
      ({ state }) => state !== "RUNNING",
    );
    assert.equal(recorded.outcome, "CANCELLED");
  }
  server.close();
});

promise("keeps-as-long-as-allowed", async () => {
  const { address, server, cut } = await gate(() => true, TIGHT_ADDRESS);
  await using client = new WeirClient({ address });
  for (const _ of [1, 2]) {
    // the second one knows
    const generation = client.generate(MODEL, { ...LONG, maxOutputTokens: 1000 });
    await generation[Symbol.asyncIterator]().next();
    cut();
    assert.equal((await generation.result()).usage.deliveredTokenCount, 1000);
    assert.equal(generation.resumeCount, 1);
  }
  await assert.rejects(
    client.complete(MODEL, { ...SHORT, keepOnDisconnectMs: 21_000 }),
    (error: unknown) => {
      assert.ok(error instanceof InvalidRequest);
      assert.match(error.message, /keepOnDisconnectMs/);
      assert.equal(Number(error.metadata["keep_on_disconnect_max_s"]), 20);
      return true;
    },
  );
  server.close();
});

promise("says-when-output-is-gone", async () => {
  await using direct = new WeirClient({ address: TIGHT_ADDRESS });
  let isOpen = true;
  const { address, server, cut } = await gate(() => isOpen, TIGHT_ADDRESS);
  await using client = new WeirClient({ address });
  const generation = client.generate(MODEL, LONG);
  await generation[Symbol.asyncIterator]().next();
  isOpen = false;
  cut();
  // The same number of steps for both.
  await direct.complete(MODEL, { ...LONG, tokenIds: [20, 21], maxOutputTokens: 2000 });
  isOpen = true;
  await assert.rejects(generation.result(), (error: unknown) => {
    assert.ok(error instanceof IncompleteGeneration && error.cause instanceof InvalidRequest);
    assert.equal(error.cause.reason, "OUTPUT_GONE");
    assert.ok(error.partial?.usage !== undefined && error.partial.tokenIds.length > 0);
    assert.ok(error.partial.tokenIds.length < error.partial.usage.billedTokenCount);
    return true;
  });
  assert.deepEqual(
    (await direct.getGeneration(generation.requestId)).usage,
    generation.partial.usage,
  );
  server.close();
});

promise("says-how-it-was-settled", async (direct) => {
  let isOpen = true;
  const { address, server, cut } = await gate(() => isOpen);
  await using client = new WeirClient({ address });
  const started = direct.generate(MODEL, { ...LONG, keepOnDisconnectMs: 50 });
  await started[Symbol.asyncIterator]().next();
  const attached = client.attach(started.requestId, { resumeMs: 60_000 });
  await attached[Symbol.asyncIterator]().next();
  isOpen = false;
  cut();
  const recorded = await until(
    () => direct.getGeneration(started.requestId),
    ({ state }) => state !== "RUNNING",
  );
  await until(
    () =>
      direct
        .attach(started.requestId)
        .result()
        .catch((error: unknown) => error),
    (end) => end instanceof AlreadyExists,
  );
  isOpen = true;
  await assert.rejects(attached.result(), (error: unknown) => {
    assert.ok(error instanceof IncompleteGeneration && error.cause instanceof AlreadyExists);
    assert.match(error.message, /settled \(cancelled\)/);
    assert.deepEqual([error.partial?.usage, error.partial?.cost], [recorded.usage, recorded.cost]);
    return true;
  });
  server.close();
});

promise("asks-again-while-the-owner-is-away", async () => {
  const attachedTo: number[] = [];
  await using server = await new ScriptedServer(async (stream) => {
    const requestId = (await stream.read())!.requestId;
    stream.send(
      { requestId, kind: { case: "admitted", value: {} } },
      delta(requestId, 1, "Hel"),
      away(requestId),
    );
    for (let frame = await stream.read(); frame !== undefined; frame = await stream.read()) {
      if (frame.kind.case !== "attach") continue;
      const { afterSeq } = frame.kind.value;
      if (attachedTo.push(Number(afterSeq)) < 3) stream.send(away(requestId));
      else
        stream.send(
          { requestId, kind: { case: "attached", value: { afterSeq } } },
          delta(requestId, 2, "lo"),
          finished(requestId, 2),
        );
    }
  }).open();
  await using client = new WeirClient({ address: server.address });
  const generation = client.generate(MODEL, SHORT);
  assert.equal((await generation.result()).text, "Hello");
  assert.deepEqual(attachedTo, [1, 1, 1]);
  assert.equal(generation.resumeCount, 1);
});

promise("costs-no-more-than-requested", async (client) => {
  const limit = new Money("USD", 4n * INPUT_PICOS + 10n * OUTPUT_PICOS);
  const { finishReason, cost, usage } = await client.complete(MODEL, { ...LONG, maxCost: limit });
  assert.equal(finishReason, "COST_LIMIT");
  assert.ok(usage.billedTokenCount >= 10 && cost.picos <= limit.picos);
  assert.deepEqual(Money.of(limit.amount, "USD"), limit);
  for (const wrong of ["", "1,5", "0.0000000000001", "1e3"])
    assert.throws(() => Money.of(wrong, "USD"), RangeError);
  await assert.rejects(
    client.complete(MODEL, { ...LONG, maxCost: new Money("USD", 1n) }),
    (error: unknown) => {
      assert.ok(error instanceof InvalidRequest);
      assert.match(error.message, /maxCost/);
      return true;
    },
  );
});

promise("changes-limits-while-it-runs", async (client) => {
  const generation = client.generate(MODEL, { ...LONG, maxOutputTokens: 4000 });
  const events = generation.events();
  while ((await events.next()).value?.type !== "delta");
  await assert.rejects(generation.update({ maxOutputTokens: 100_000 }), InvalidRequest);
  const maxCost = new Money("USD", 5000n * OUTPUT_PICOS);
  assert.deepEqual(await generation.update({ maxCost }), { maxOutputTokens: 4000, maxCost });
  assert.equal((await generation.update({ maxOutputTokens: 1 })).maxOutputTokens, 1);
  const { finishReason, usage } = await generation.result();
  assert.equal(finishReason, "LENGTH");
  assert.ok(usage.deliveredTokenCount < 4000);
  await assert.rejects(generation.update({ maxOutputTokens: 10 }), FailedPrecondition);
});

/**
 * Returns the first delta of a request with a prefetch of 8, after enough engine steps that the
 * server is far ahead.
 */
async function readAhead(
  client: WeirClient,
  options: GenerateOptions,
): Promise<{ generation: GenerationStream; deltas: AsyncGenerator<Delta>; first: Delta }> {
  const generation = client.generate(MODEL, { ...LONG, prefetchTokens: 8, ...options });
  const deltas = generation[Symbol.asyncIterator]();
  const first = (await deltas.next()).value;
  assert.ok(first !== undefined);
  assert.equal(
    (await client.complete(MODEL, { ...SHORT, tokenIds: [20, 21], maxOutputTokens: 300 })).usage
      .deliveredTokenCount,
    300,
  );
  return { generation, deltas, first };
}

promise("reads-no-further-ahead-than-requested", async (client) => {
  const whole = await client.complete(MODEL, LONG);
  const { generation, deltas, first } = await readAhead(client, { keepOnDisconnectMs: 0 });
  assert.ok(generation.partial.tokenIds.length <= first.tokenIds.length + 8);
  const seqs = [first.seq];
  for await (const { seq } of deltas) seqs.push(seq);
  assert.deepEqual(
    seqs,
    Array.from(seqs, (_, index) => index + 1),
  );
  assert.deepEqual((await generation.result()).tokenIds, whole.tokenIds);
  const broken = await streamedOverBreaks(2, { ...RESUMED, prefetchTokens: 8 });
  assert.deepEqual(broken.tokenIds, whole.tokenIds);
  assert.equal(broken.resumedCount, 2);
  assert.throws(() => client.generate(MODEL, { ...SHORT, prefetchTokens: 0 }), /prefetchTokens/);
});

promise("takes-nothing-behind-its-cancel", async (client) => {
  for (const keepOnDisconnectMs of [0, 500_000]) {
    const { generation, first } = await readAhead(client, { keepOnDisconnectMs });
    generation.cancel();
    const { finishReason, tokenIds, usage } = await generation.result();
    assert.equal(finishReason, "CANCELLED");
    assert.ok(tokenIds.length <= first.tokenIds.length + 8);
    if (keepOnDisconnectMs === 0) assert.equal(usage.deliveredTokenCount, tokenIds.length);
    else assert.ok(usage.deliveredTokenCount > 200);
  }
});

promise("ends-a-stalled-reader", async () => {
  await using client = new WeirClient({ address: TIGHT_ADDRESS });
  const generation = client
    .generate(MODEL, { ...LONG, maxOutputTokens: 2000, keepOnDisconnectMs: 0, prefetchTokens: 8 })
    .start();
  const look = (): Promise<string> =>
    client.getGeneration(generation.requestId).then(
      ({ state }) => state,
      () => "NOT THERE YET",
    );
  await until(look, (state) => state === "SETTLED"); // meanwhile nothing is read
  const deltas: Delta[] = [];
  for await (const each of generation) deltas.push(each);
  const { finishReason, tokenIds, usage } = await generation.result();
  assert.equal(finishReason, "SLOW_CONSUMER");
  assert.deepEqual([usage.deliveredTokenCount, usage.billedTokenCount, tokenIds.length], [8, 8, 8]);
  assert.deepEqual(
    deltas.flatMap((each) => each.tokenIds),
    tokenIds,
  );
});

promise("embeds", async (client) => {
  const quote = await client.quoteEmbed(ENCODER, ["the garden", [10, 11, 12]]);
  const { embeddings, usage, cost } = await client.embed(ENCODER, ["the garden", [10, 11, 12]]);
  assert.deepEqual(
    [quote.wouldAdmit, quote.inputTokenCount, quote.worstCaseCost],
    [true, usage.embeddingTokenCount, cost],
  );
  const encoder = (await client.listModels()).find(({ name }) => name === ENCODER);
  assert.equal(encoder?.task, "EMBED");
  assert.deepEqual(
    embeddings.map(({ vector }) => vector.length),
    [encoder.embeddingDimension, encoder.embeddingDimension],
  );
  assert.equal(embeddings[1]?.tokenCount, 3);
  assert.equal(
    usage.embeddingTokenCount,
    embeddings.reduce((sum, { tokenCount }) => sum + tokenCount, 0),
  );
  assert.equal(cost.picos, BigInt(usage.embeddingTokenCount) * EMBEDDING_PICOS);
  await assert.rejects(client.embed(MODEL, "the garden"), InvalidRequest);
});

promise("offers-every-field", async () => {
  await using server = await new ScriptedServer(answering("a")).open();
  await using client = new WeirClient({ address: server.address });
  const every: GenerateOptions = {
    maxOutputTokens: 5,
    maxCost: new Money("USD", 1n),
    temperature: 1,
    topP: 0.5,
    topK: 3,
    seed: 1,
    minP: 0.1,
    repetitionPenalty: 1.1,
    presencePenalty: 0.1,
    frequencyPenalty: 0.1,
    logitBias: { 7: 1 },
    stop: "x",
    stopTokenIds: [8],
    minOutputTokens: 1,
    maxReasoningTokens: 1,
    ignoreEos: true,
    choiceCount: 2,
    beamWidth: 2,
    lengthPenalty: 0.5,
    earlyStopping: true,
    topLogprobs: 1,
    usageIntervalTokens: 1,
    labels: { a: "b" },
    endUser: "alice",
    tier: "batch",
    startTimeoutMs: 5000,
    region: "here",
    noFallback: true,
    traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    tracestate: "a=b",
    keepOnDisconnectMs: 5000,
    prefetchTokens: 10,
    tools: [{ name: "t" }],
    toolChoice: "auto",
    singleToolCall: true,
  };
  const talk = { thinking: true, reasoningEffort: "low", continuesLastMessage: true };
  await client.complete(MODEL, { ...every, ...talk, prompt: "Hi", jsonSchema: {} });
  await client.complete(MODEL, { ...every, text: "Hi", regex: "a" });
  await client.complete(MODEL, { ...every, tokenIds: [7], lark: "start: A" });
  const options = { truncate: true, labels: { a: "b" }, endUser: "alice", tier: "batch" } as const;
  for (const inputs of ["a", [[7]]]) await client.embed(MODEL, inputs, options);
  const starts = server.frames
    .map(({ kind }) => (kind.case === "start" ? kind.value : undefined))
    .filter((each) => each !== undefined);
  const offered = new Set([
    ...starts.flatMap((start) => fieldsSet(StartFrameSchema, start)),
    ...server.embeddings.flatMap((request) => fieldsSet(EmbedRequestSchema, request)),
  ]);
  const everything = [...fieldsOf(StartFrameSchema), ...fieldsOf(EmbedRequestSchema)];
  const unoffered = JSON.parse(
    readFileSync(new URL("../../../unoffered.json", import.meta.url), "utf8"),
  ) as Record<string, string>;
  assert.deepEqual(
    everything.filter((field) => !offered.has(field)),
    Object.keys(unoffered),
  );
  assert.deepEqual(
    [server.frames[0]?.traceparent, server.frames[0]?.tracestate],
    [every.traceparent, every.tracestate],
  );
});

const NESTED = [
  "weir.v1.Sampling",
  "weir.v1.BeamSearch",
  "weir.v1.ResponseFormat",
  "weir.v1.EmbedInput",
  "weir.v1.Conversation",
]; // whose fields are options, too

/** The full names of what a request may hold. */
function fieldsOf(schema: DescMessage): string[] {
  return schema.fields.flatMap((field) => [
    `${schema.typeName}.${field.name}`,
    ...(field.message && NESTED.includes(field.message.typeName) ? fieldsOf(field.message) : []),
  ]);
}

/** Of those, what one holds. */
function fieldsSet(schema: DescMessage, message: ProtoMessage): string[] {
  const reflected = reflect(schema, message);
  return reflected.sortedFields
    .filter((field) => reflected.isSet(field))
    .flatMap((field) => {
      const name = `${schema.typeName}.${field.name}`;
      if (!field.message || !NESTED.includes(field.message.typeName)) return [name];
      const value: unknown = reflected.get(field);
      const nested = isReflectMessage(value) ? [value] : [...(value as Iterable<ReflectMessage>)];
      return [name, ...nested.flatMap((each) => fieldsSet(each.desc, each.message))];
    });
}

/** A token that tells its expiry. */
function expiringIn(seconds: number): string {
  const claims = JSON.stringify({ exp: Date.now() / 1000 + seconds });
  return `e30.${Buffer.from(claims).toString("base64url")}.c2ln`;
}

promise("replaces-a-refused-key", async () => {
  const wrong = "wk_unknown1_secret";
  for (const [given, calls] of [
    [[environment("WEIR_API_KEY")], 1],
    [[wrong, environment("WEIR_API_KEY")], 2],
  ] as const) {
    for (const use of [
      (each: WeirClient) => each.listModels(),
      (each: WeirClient) => each.complete(MODEL, SHORT),
    ]) {
      let count = 0;
      const apiKey = async (): Promise<string> => given[Math.min(count++, given.length - 1)]!;
      await using client = new WeirClient({ apiKey, maxRetries: 0 });
      await Promise.all([use(client), use(client), use(client)]);
      assert.equal(count, calls);
    }
  }
  let refusedCount = 0;
  const refusing = (): string => `wk_unknown${++refusedCount}_secret`;
  await using refused = new WeirClient({ apiKey: refusing });
  await assert.rejects(refused.listModels(), Unauthenticated);
  await assert.rejects(refused.complete(MODEL, SHORT), Unauthenticated);
  assert.equal(refusedCount, 4, "each call has a fresh token, and tries one more");

  await using failing = new WeirClient({
    apiKey: () => Promise.reject(new Error("no network")),
  });
  await assert.rejects(failing.listModels(), /apiKey failed: Error: no network/);
  await assert.rejects(failing.complete(MODEL, SHORT), /apiKey failed: Error: no network/);

  // A stream that refuses new requests finishes what runs on it.
  let release: () => void = () => {};
  const held = new Promise<void>((resolve) => (release = resolve));
  await using server = await new ScriptedServer(async (stream) => {
    const running = (await stream.read())!.requestId;
    const admitted = { case: "admitted", value: { inputTokenCount: 5n } } as const;
    stream.send({ requestId: running, kind: admitted }, delta(running, 1, "old"));
    const { requestId } = (await stream.read())!;
    const refusal = { code: status.UNAUTHENTICATED, message: "it has expired" };
    stream.send({ requestId, kind: { case: "failed", value: { status: refusal } } });
    await held;
    stream.send(finished(running, 1));
    while (await stream.read());
  }, answering("new")).open();
  let tokenCount = 0;
  let life = 300;
  const apiKey = (): string => (tokenCount++, expiringIn(life));
  await using client = new WeirClient({ address: server.address, apiKey, maxRetries: 0 });
  const running = client.generate(MODEL, SHORT);
  await running[Symbol.asyncIterator]().next();
  for (let _ = 0; _ < 2; _ += 1) assert.equal((await client.complete(MODEL, SHORT)).text, "new");
  release();
  assert.equal((await running.result()).text, "old");
  assert.deepEqual([server.streamCount, tokenCount], [2, 2]);

  // Before a token expires, another one is fetched.
  life = 0.5;
  server.refusals = [status.UNAUTHENTICATED];
  await client.listModels();
  assert.equal(tokenCount, 3);
  await until(async () => (await client.listModels(), tokenCount), (count) => count >= 4);
});

promise("refuses-half-a-certificate", async () => {
  const address = "https://weir.example";
  assert.throws(
    () => new WeirClient({ address, clientCertificate: Buffer.from("some") }),
    /clientKey/,
  );
  assert.throws(
    () => new WeirClient({ address, rootCertificates: "no/such/file" }),
    /no\/such\/file/,
  );
});

/** A TCP door before the server that lets those connections through that `admit` says yes to. */
async function gate(
  admit: (socket: Socket) => boolean,
  behindAddress = ADDRESS,
): Promise<{ address: string; server: Server; cut: () => void }> {
  const colon = behindAddress.lastIndexOf(":");
  const [host, port] = [behindAddress.slice(0, colon), Number(behindAddress.slice(colon + 1))];
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    socket.on("close", () => sockets.delete(socket));
    if (!admit(socket)) {
      socket.destroy();
      return;
    }
    const behind = connect(port, host);
    behind.on("error", () => socket.destroy());
    socket.on("close", () => behind.destroy());
    behind.on("close", () => socket.destroy());
    socket.pipe(behind).pipe(socket);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  server.unref(); // a test that fails leaves it open
  const address = server.address();
  assert.ok(address !== null && typeof address === "object");
  const cut = (): void => sockets.forEach((socket) => socket.resetAndDestroy());
  return { address: `127.0.0.1:${address.port}`, server, cut };
}
