// What the pages of the console build of names that tenants chose. Run by tests/api/test_console_page.py.

import assert from "node:assert/strict";
import { test } from "node:test";

// The part of the DOM that pages build with: elements with attributes, text nodes and listeners.
class Node {
  constructor(name, text = "") {
    Object.assign(this, { name, text, attributes: {}, children: [] });
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  addEventListener() {}
  append(child) {
    this.children.push(child);
  }
  get content() {
    return this.text + this.children.map((each) => each.content).join("");
  }
  all(name) {
    return [...(this.name === name ? [this] : []), ...this.children.flatMap((each) => each.all(name))];
  }
}
globalThis.Node = Node;
globalThis.document = {
  createElement: (name) => new Node(name),
  createElementNS: (_, name) => new Node(name),
  createTextNode: (text) => new Node("#text", text),
  getElementById: () => null,
};
const { table } = await import("../../api/console/static/dom.mjs");
const { listColumns } = await import("../../api/console/static/end-users.mjs");

const { auditColumns } = await import("../../api/console/static/audit.mjs");
const { limitColumns } = await import("../../api/console/static/limits.mjs");
const { View } = await import("../../api/console/static/view.mjs");

const ID = "6c0b2f8e-7d2a-4b1e-9d55-0a5f2f3c4d5e";
// Names of end users, and what a page shows of them.
const NAMES = [
  ["<script>alert(1)</script>"], ["\"><img src=x onerror=alert(1)>"], ["javascript:alert(1)"], ["a/b/../c?x=1&y=2#z"], ["100%25%2F"],
  ["\u0645\u0633\u062a\u062e\u062f\u0645"], ["\ud83d\udc69\ud83d\udc67"], ["x".repeat(512)], ["--yes"], ["'; DROP TABLE t; --"],
  ["\u202egpj.exe", "\ufffdgpj.exe"], ["a\u200bb", "a\ufffdb"],
];

function pageOf(hash) {
  return new View({ id: "end-users", title: "End users" }, {}, new URLSearchParams(hash), {});
}

test("names of end users are text, and no address has them", () => {
  const found = NAMES.map(([name]) => ({ endUserId: ID, name, state: "END_USER_STATE_ACTIVE", monthCost: { currencyCode: "USD" } }));
  const drawn = table("End users", listColumns(pageOf("org=acme&prefix=a"), "USD", found), found);
  const links = drawn.all("a");
  assert.deepEqual(links.map((each) => each.attributes.href), NAMES.map(() => `#/end-users?org=acme&user=${ID}`));
  assert.deepEqual(links.map((each) => each.content), NAMES.map(([name, shown]) => shown ?? name));
  assert.deepEqual(links.map((each) => each.all("bdi").length), NAMES.map(() => 1), "its direction is its own");
  assert.equal(drawn.all("script").length + drawn.all("img").length, 0);
});

test("an erased end user is shown by its id", () => {
  const [row] = [{ endUserId: ID, state: "END_USER_STATE_ERASED" }];
  const drawn = table("End users", listColumns(pageOf(""), "USD", [row]), [row]);
  assert.equal(drawn.all("a")[0].content, `(erased) ${ID}`);
});

test("the tightest limit is shown with its share", () => {
  const quota = { dimension: "QUOTA_DIMENSION_TOKENS_PER_DAY", limitValue: "1000", usedValue: "800", heldValue: "39", model: "<b>" };
  const row = { endUserId: ID, name: "alice", tightestQuota: quota };
  const drawn = table("End users", listColumns(pageOf(""), "USD", [row]), [row]);
  assert.ok(drawn.content.includes("83 % of tokens per day on <b>"));
  assert.equal(drawn.all("b").length, 0);
});

test("the audit log names what an entry refers to, as text", () => {
  const limit = { subject_id: "u1", within_id: "o1", dimension: "cost_picos_per_month", limit_value: 5 };
  const entries = [
    { entryId: "1", action: "api_key.revoke", subjectId: "k1", beforeJson: '{"name": "ci"}', names: { k1: "wk_abc" } },
    { entryId: "2", action: "quota.set", subjectId: "q1", afterJson: JSON.stringify(limit), names: { u1: "<b>alice</b>", o1: "acme" } },
    { entryId: "3", action: "price.set", subjectId: "7", afterJson: '{"model": "demo"}' },
    { entryId: "4", action: "end_user.erase", subjectId: ID },
    { entryId: "5", action: "x", subjectId: "constructor", beforeJson: "no JSON" },
  ];
  const [first, second, third, fourth, fifth] = entries.map((each) => table("Changes", auditColumns(), [each]));
  assert.ok(first.content.includes("wk_abck1"));
  assert.ok(second.content.includes("cost per month of <b>alice</b> within acmeq1"));
  assert.ok(second.content.includes("subject_id: \u2014 \u2192 <b>alice</b> (u1)"));
  assert.equal(second.all("b").length, 0);
  assert.ok(third.content.includes("demo7") && fourth.content.includes(ID) && fifth.content.includes("constructor1 field"));
});

test("a selector says for whom it is, and has nothing used", () => {
  const [selector, own] = [{ forEach: "label:<i>" }, { selectorId: "s" }].map((more) => ({
    quotaId: "q", subject: "QUOTA_SUBJECT_ORGANIZATION", subjectName: "acme", dimension: "QUOTA_DIMENSION_TOKENS_PER_DAY", limitValue: "77", remainingValue: "55", enforced: true, ...more,
  }));
  const [first, second] = [selector, own].map((each) => table("Limits", limitColumns("USD"), [each]));
  assert.ok(first.content.includes("each label <i> of organizationacme") && first.content.includes("77"));
  assert.ok(!first.content.includes("55") && second.content.includes("55") && second.content.includes("by selector"));
  assert.equal(first.all("i").length, 0);
});
