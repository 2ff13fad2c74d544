// Numbers, money and times as the console shows them, to the character.

import assert from "node:assert/strict";
import { test } from "node:test";
import { chatPart } from "../src/client.js";
import * as format from "../src/format.js";
import { digits, exactly, listed, timeOf } from "../src/parts/actions.js";
import { stacks, ticks } from "../src/parts/charts.js";
import { snippet } from "../src/snippets.js";

test("counts are grouped, and a missing number is zero", () => {
  assert.equal(format.count("9223372036854775807"), "9,223,372,036,854,775,807");
  assert.equal(format.count(undefined), "0");
  assert.equal(format.count("-1000"), "\u22121,000");
  assert.equal(format.count(999), "999");
});

test("money is exact to the pico, with its sign", () => {
  const usd = (units?: string, picos?: string) => ({
    currencyCode: "USD",
    ...(units ? { units } : {}),
    ...(picos ? { picos } : {}),
  });
  assert.equal(
    format.money(usd("9007199254740993", "1")),
    "9,007,199,254,740,993.000000000001 USD",
  );
  assert.equal(format.money(usd("0", "7050000")), "0.00000705 USD");
  assert.equal(format.money(usd(undefined, "-500000000000")), "\u22120.50 USD");
  assert.equal(format.money(usd("-1", "-500000000000")), "\u22121.50 USD");
  assert.equal(format.money(usd("12")), "12.00 USD");
  assert.equal(format.money(undefined), "\u2014");
});

test("an amount has at least the decimals of its currency", () => {
  const all: [string, string, string][] = [
    ["JPY", "5", "5.25"],
    ["USD", "5.00", "5.25"],
    ["KWD", "5.000", "5.250"],
    ["CLF", "5.0000", "5.2500"],
  ];
  for (const [currencyCode, whole, fine] of all) {
    assert.equal(format.money({ currencyCode, units: "5" }), `${whole} ${currencyCode}`);
    assert.equal(
      format.money({ currencyCode, units: "5", picos: "250000000000" }),
      `${fine} ${currencyCode}`,
    );
    assert.equal(format.amount(format.sumOf([undefined, { currencyCode, units: "5" }])), whole);
    assert.equal(format.amount(format.negated({ currencyCode, units: "-5" })), whole);
  }
  assert.equal(format.amountPlaces([undefined, { currencyCode: "JPY", units: "5" }]), 0);
});

test("prices are per million tokens", () => {
  assert.equal(format.perMillion("150000"), "0.15");
  assert.equal(format.perMillion("1"), "0.000001");
});

test("limits of money are in units of the currency, others are whole numbers", () => {
  assert.equal(format.limitValue("QUOTA_DIMENSION_COST_PICOS_PER_MONTH", "5000000000000"), "5.00");
  assert.equal(format.limitValue("QUOTA_DIMENSION_TOKENS_PER_DAY", "5000"), "5,000");
  assert.equal(format.dimensionWords("QUOTA_DIMENSION_COST_PICOS_PER_MONTH"), "cost per month");
  assert.equal(
    format.dimensionWords("QUOTA_DIMENSION_TOKENS_PER_WINDOW", 300),
    "tokens in any 300 minutes",
  );
  assert.equal(format.dimensionWords("QUOTA_DIMENSION_COST_PICOS_PER_LIFETIME"), "cost in total");
});

test("bars stay between nothing and full", () => {
  assert.equal(format.share("50", "200"), 0.25);
  assert.equal(format.share("300", "200"), 1);
  assert.equal(format.share("-3", "200"), 0);
  assert.equal(format.share("1", "0"), 1);
  assert.equal(format.share(undefined, undefined), 0);
  assert.equal(format.share("9223372036854775807", "9223372036854775807"), 1);
});

test("waits are rounded up", () => {
  assert.equal(format.wait(format.secondsOf("0.250s")), "0.3 s");
  assert.equal(format.wait(format.secondsOf("61.2s")), "62 s");
  assert.equal(format.wait(7201), "3 h");
  assert.equal(format.wait(null), "\u2014");
  assert.equal(format.rate(2193.64), "2,193.6");
});

test("times are in the viewer's zone, with UTC beside them", () => {
  assert.equal(format.localTime("2026-07-01T23:30:00Z"), "2026-07-02 01:30:00");
  assert.equal(format.utcTime("2026-07-01T23:30:00Z"), "2026-07-01 23:30:00 UTC");
});

test("months and days are those of the bill, in UTC", () => {
  assert.equal(format.monthOf(new Date("2026-12-31T23:30:00Z")), "2026-12");
  assert.equal(format.monthOf(new Date("2026-01-31T12:00:00Z"), 2), "2025-11");
  assert.equal(format.daysOf("2028-02").at(-1), "2028-02-29");
});

test("foreign text cannot hide or turn", () => {
  assert.equal(format.plain("a\u202eb\u0000c\n"), "a\ufffdb\ufffdc\ufffd");
  assert.equal(format.plain("<img src=x onerror=alert(1)>"), "<img src=x onerror=alert(1)>");
});

test("emoji may be joined, and nothing else", () => {
  for (const family of [
    "\u{1f469}\u200d\u{1f467}",
    "\u{1f469}\u{1f3fd}\u200d\u2695\ufe0f",
    "\u2764\ufe0f\u200d\u{1f525}",
  ])
    assert.equal(format.plain(family), family);
  assert.equal(format.plain("al\u200dice\u200d"), "al\ufffdice\ufffd");
  assert.equal(format.plain("\u{1f469}\u200dx"), "\u{1f469}\ufffdx");
});

test("an argument of a command is quoted, whatever it contains", () => {
  const shown = ["alice", "a b", "it's", "$(rm)", "--yes", "a\nb"].map(format.quoted);
  assert.deepEqual(shown, ["alice", "'a b'", "'it'\\''s'", "'$(rm)'", "'--yes'", "'a\ufffdb'"]);
});

test("a share of a limit is rounded down, and exact", () => {
  assert.equal(format.percentOf("800", "39", "1000"), "83");
  assert.equal(format.percentOf("9223372036854775806", undefined, "9223372036854775807"), "99");
  assert.equal(format.percentOf(undefined, undefined, "0"), "100");
  assert.equal(format.percentOf("3000", "0", "2"), "150,000");
});

test("who cannot be reached is asked less often, up to a minute", () => {
  assert.deepEqual(
    [0, 1, 2, 5, 99].map((failures) => format.backedOff(2000, failures)),
    [2000, 4000, 8000, 60000, 60000],
  );
});

test("a column of amounts has the decimals of its finest", () => {
  const usd = (units?: string, picos?: string) => ({
    currencyCode: "USD",
    ...(units ? { units } : {}),
    ...(picos ? { picos } : {}),
  });
  assert.equal(
    format.amountPlaces([usd("1"), usd("0", "7050000"), undefined, usd("0", "-500000000000")]),
    8,
  );
  assert.equal(format.amount(usd("1"), 8), "1.00000000");
  assert.equal(format.amountPlaces([]), 2);
});

test("an axis has round marks, from 0 to at least the largest value", () => {
  const marks = (most: number) => ticks(BigInt(most)).map(Number);
  assert.deepEqual([0, 1, 4, 5, 9, 41, 1000].map(marks), [
    [0],
    [0, 1],
    [0, 1, 2, 3, 4],
    [0, 2, 4, 6],
    [0, 5, 10],
    [0, 20, 40, 60],
    [0, 500, 1000],
  ]);
  for (const digits of [1, 6, 12, 30]) {
    const most = BigInt("7".repeat(digits)),
      found = ticks(most);
    assert.ok(found.length <= 5 && found.at(-1)! >= most && found.at(-2)! < most);
  }
});

test("a cost at a glance is rounded, and exact near zero", () => {
  assert.equal(format.brief(29130360225000n, "USD"), "29.13");
  assert.equal(format.brief(29135000000000n, "USD"), "29.14");
  assert.equal(format.brief(38700000n, "USD"), "0.0000387");
  assert.equal(format.brief(1234567000000000000n, "JPY"), "1,234,567");
});

test("days run from one to another over the ends of months", () => {
  assert.deepEqual(format.daysBetween("2028-02-28", "2028-03-01"), [
    "2028-02-28",
    "2028-02-29",
    "2028-03-01",
  ]);
  assert.equal(format.dayOf(Date.parse("2026-03-01T23:59:59Z"), 1), "2026-02-28");
});

test("a stack is drawn from its top down, and each bar reaches the sum of those below", () => {
  assert.deepEqual(
    stacks(
      [
        ["01", [1n, 2n, 4n]],
        ["02", [0n, 0n, 8n]],
      ],
      3,
    ),
    [
      [7, 8],
      [3, 0],
      [1, 0],
    ],
  );
});

test("entered amounts are exact, and anything else is refused", () => {
  assert.equal(exactly("limit_value", "12.50"), "12500000000000");
  assert.equal(
    exactly("limit_value", "9,007,199,254,740,993.000000000001"),
    "9007199254740993000000000001",
  );
  assert.equal(exactly("limit_value", "0"), "0");
  for (const wrong of ["", "1e3", "0x10", "1.0000000000001", ".5", "5 USD", "NaN", "1,5"]) {
    assert.throws(() => exactly("limit_value", wrong), { field: "limit_value" }, wrong);
  }
});

test("entered numbers, lists and times are as the server reads them", () => {
  assert.equal(digits(" 1,000,000 "), "1000000");
  assert.equal(digits("1,5"), "1,5", "not a group of thousands: the server refuses it");
  assert.deepEqual(listed(" a, b\nc "), ["a", "b", "c"]);
  assert.equal(timeOf("expire_time", "2026-07-01T12:00"), "2026-07-01T10:00:00.000Z");
  assert.throws(() => timeOf("expire_time", ""), { field: "expire_time" });
});

test("the cost of a streamed chat keeps its digits", () => {
  const event =
    '{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}, ' +
    '"weir": {"cost": {"currency_code": "USD", "amount": "9", "picos": 9007199254740993001}}}';
  assert.deepEqual(chatPart(event).cost, { currency_code: "USD", picos: "9007199254740993001" });
  assert.deepEqual(chatPart('{"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}'), {
    delta: "a",
  });
  assert.throws(() => chatPart('{"error": {"message": "quota"}}'), /quota/);
});

test("texts in the code of a call stay texts", () => {
  const asked = {
    model: "demo",
    system: "",
    prompt: `it's "a"\n$(rm) \\`,
    maxTokens: 5,
    temperature: null,
  };
  assert.ok(snippet("curl", asked, "http://a/v1").includes(`it'\\''s`));
  for (const language of ["python", "typescript"] as const) {
    assert.ok(snippet(language, asked, "http://a/v1").includes(JSON.stringify(asked.prompt)));
    assert.ok(snippet(language, asked, "http://a/v1").includes("max_completion_tokens"));
  }
});
