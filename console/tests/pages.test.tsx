// Pages of names that tenants chose, as HTML.

import assert from "node:assert/strict";
import { test } from "node:test";
import { renderToStaticMarkup } from "react-dom/server";
import type { AuditEntryJson } from "../src/gen/weir/v1/admin_service_pb.js";
import { auditColumns } from "../src/pages/audit.js";
import { listColumns } from "../src/pages/end-users.js";
import { updateOf } from "../src/pages/keys.js";
import { limitColumns } from "../src/pages/limits.js";
import { stagesOf } from "../src/pages/requests.js";
import { signInAsked } from "../src/sign-in.js";
import { grouped, summed } from "../src/pages/usage.js";
import { Table } from "../src/parts/table.js";
import type { Column } from "../src/parts/table.js";
import { addressOf } from "../src/view.js";

const ID = "6c0b2f8e-7d2a-4b1e-9d55-0a5f2f3c4d5e";
// Names of end users, and what a page shows of them.
const NAMES: [string, string?][] = [
  ["<script>alert(1)</script>"],
  ['"><img src=x onerror=alert(1)>'],
  ["javascript:alert(1)"],
  ["a/b/../c?x=1&y=2#z"],
  ["100%25%2F"],
  ["\u0645\u0633\u062a\u062e\u062f\u0645"],
  ["\ud83d\udc69\ud83d\udc67"],
  ["x".repeat(512)],
  ["--yes"],
  ["'; DROP TABLE t; --"],
  ["\u202egpj.exe", "\ufffdgpj.exe"],
  ["a\u200bb", "a\ufffdb"],
];

function drawn<Row>(columns: Column<Row>[], rows: Row[]): string {
  return renderToStaticMarkup(<Table caption="Shown" columns={columns} rows={rows} />);
}

// The texts of an element, without its markup.
function texts(html: string): string {
  const plain = html.replace(/<[^>]*>/g, "");
  const characters: Record<string, string> = {
    lt: "<",
    gt: ">",
    quot: '"',
    "#x27": "'",
    amp: "&",
  };
  return plain.replace(/&(lt|gt|quot|#x27|amp);/g, (_, name: string) => characters[name]!);
}

const listed = {
  address: (changes: Record<string, string>) => addressOf("end-users", { org: "acme", ...changes }),
};

test("names of end users are text, and no address has them", () => {
  for (const [name, shown] of NAMES) {
    const row = {
      endUserId: ID,
      name,
      state: "END_USER_STATE_ACTIVE" as const,
      monthCost: { currencyCode: "USD" },
    };
    const html = drawn(listColumns(listed, "USD", [row]), [row]);
    const [, address, content] = /<a href="([^"]*)">(.*?)<\/a>/s.exec(html)!;
    assert.equal(address, `#/end-users?org=acme&amp;user=${ID}`);
    assert.equal(texts(content!), shown ?? name);
    assert.match(content!, /^<bdi/, "its direction is its own");
    assert.doesNotMatch(html, /<(script|img)/);
  }
});

test("an erased end user is shown by its id", () => {
  const row = { endUserId: ID, state: "END_USER_STATE_ERASED" as const };
  assert.ok(texts(drawn(listColumns(listed, "USD", [row]), [row])).includes(`(erased) ${ID}`));
});

test("the tightest limit is shown with its share", () => {
  const quota = {
    dimension: "QUOTA_DIMENSION_TOKENS_PER_DAY" as const,
    limitValue: "1000",
    usedValue: "800",
    heldValue: "39",
    model: "<b>",
  };
  const row = { endUserId: ID, name: "alice", tightestQuota: quota };
  const html = drawn(listColumns(listed, "USD", [row]), [row]);
  assert.ok(texts(html).includes("83 % of tokens per day on <b>"));
  assert.doesNotMatch(html, /<b>/);
});

test("the audit log names what an entry refers to, as text", () => {
  const limit = {
    subject_id: "u1",
    within_id: "o1",
    dimension: "cost_picos_per_month",
    limit_value: 5,
  };
  const entries: AuditEntryJson[] = [
    {
      entryId: "1",
      action: "api_key.revoke",
      subjectId: "k1",
      beforeJson: '{"name": "ci"}',
      names: { k1: "wk_abc" },
    },
    {
      entryId: "2",
      action: "quota.set",
      subjectId: "q1",
      afterJson: JSON.stringify(limit),
      names: { u1: "<b>alice</b>", o1: "acme" },
    },
    { entryId: "3", action: "price.set", subjectId: "7", afterJson: '{"model": "demo"}' },
    { entryId: "4", action: "end_user.erase", subjectId: ID },
    { entryId: "5", action: "x", subjectId: "constructor", beforeJson: "no JSON" },
  ];
  const [first, second, third, fourth, fifth] = entries.map((each) =>
    drawn(auditColumns(), [each]),
  );
  assert.ok(texts(first!).includes("wk_abck1"));
  assert.ok(texts(second!).includes("cost per month of <b>alice</b> within acmeq1"));
  assert.ok(texts(second!).includes("subject_id: \u2014 \u2192 <b>alice</b> (u1)"));
  assert.doesNotMatch(second!, /<b>/);
  assert.ok(texts(third!).includes("demo7") && texts(fourth!).includes(ID));
  assert.ok(texts(fifth!).includes("constructor1 field"));
});

test("a selector says for whom it is, and has nothing used", () => {
  const [selector, own] = [{ forEach: "label:<i>" }, { selectorId: "s" }].map((more) =>
    drawn(limitColumns("USD"), [
      {
        quotaId: "q",
        subject: "QUOTA_SUBJECT_ORGANIZATION" as const,
        subjectName: "acme",
        dimension: "QUOTA_DIMENSION_TOKENS_PER_DAY" as const,
        limitValue: "77",
        remainingValue: "55",
        enforced: true,
        ...more,
      },
    ]),
  );
  assert.ok(
    texts(selector!).includes("each label <i> of organizationacme") && selector!.includes("77"),
  );
  assert.ok(!selector!.includes("55") && own!.includes("55") && own!.includes("by selector"));
  assert.doesNotMatch(selector!, /<i>/);
});

test("a changed key sends only what changed", () => {
  const key = {
    apiKeyId: ID,
    name: "ci",
    scopes: ["inference"],
    models: ["demo"],
    allowedNetworks: [],
    maxInputTokens: "5",
    role: "viewer",
  };
  const same = {
    name: "ci",
    scopes: "inference",
    models: "demo",
    allowed_networks: "",
    max_input_tokens: "5",
    role: "viewer",
  };
  assert.deepEqual(updateOf(key, same), { apiKey: ID });
  assert.deepEqual(updateOf(key, { ...same, models: "", max_input_tokens: "", role: "" }), {
    apiKey: ID,
    allModels: true,
    maxInputTokens: "0",
    role: "",
  });
  assert.deepEqual(
    updateOf(key, { ...same, allowed_networks: "10.0.0.0/8, ::1", max_output_tokens: "1,000" }),
    { apiKey: ID, allowedNetworks: ["10.0.0.0/8", "::1"], maxOutputTokens: "1000" },
  );
});

test("usage adds up exactly", () => {
  const row = {
    model: "demo",
    requestCount: "9007199254740993",
    cost: { currencyCode: "USD", units: "9007199254740993", picos: "1" },
    failed: { requestCount: "2" },
  };
  const [sum] = grouped([row, row, row], () => "demo");
  assert.equal(sum!.requestCount, 27021597764222979n);
  assert.equal(sum!.cost, 27021597764222979000000000003n);
  assert.equal(summed([row, {}]).failed, 2n);
});

test("the stages of a request follow each other, and a stall ends where the settlement begins", () => {
  const stages = stagesOf({
    authMs: 1,
    queueMs: 4,
    decodeMs: 95,
    clientStallMs: 20,
    settleMs: 10,
    totalMs: 110,
  });
  const shown = Object.fromEntries(
    stages
      .filter((each) => each.length)
      .map((each) => [each.name, [each.start, each.start + each.length]]),
  );
  assert.deepEqual(shown, {
    auth: [0, 1],
    queue: [1, 5],
    decode: [5, 100],
    "client stall": [80, 100],
    settle: [100, 110],
  });
});

test("the address of a sign-in shows texts of the catalogue only", () => {
  const failure = (query: string) => signInAsked(`#/sign-in?${query}`)?.failure ?? "";
  assert.match(failure("failed=expired&number=ab12cd34"), /too long.* ab12cd34\.$/);
  for (const reason of ["Call+555-0100", "constructor", "__proto__", "<b>"]) {
    const shown = failure(`failed=${reason}&number=${reason}`);
    assert.equal(shown.trim(), "The sign-in failed. Try again.");
  }
  assert.equal(signInAsked("#/usage?link=wl_x"), null);
  assert.equal(signInAsked("#/sign-in"), null);
  assert.equal(signInAsked("#/sign-in?link=wl_x")?.link, "wl_x");
});
