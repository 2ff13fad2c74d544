// Formatting of numbers, money and times; pure functions. 64-bit integers arrive as text and stay
// exact.

import type { MoneyJson } from "./gen/weir/v1/types_pb.js";

// 64-bit integer of a message, which omits zeros, or one computed here.
export type Whole = string | number | bigint | null | undefined;
// Floating-point number of a message: protobuf writes what JSON lacks as text.
export type Float = number | "NaN" | "Infinity" | "-Infinity" | null | undefined;
// Amount in picos, as the page computes it from messages.
export interface Amount {
  currencyCode?: string | undefined;
  picos: bigint;
  units?: undefined;
}
export type AnyMoney = MoneyJson | Amount | undefined;

const MINUS = "\u2212";
export const PICOS = 12;
const DAY_MS = 86400000;
// Decimals: prices are shown per million tokens, and sent in picos per token.
const TOKENS_PER_PRICE = 6;

// ISO 4217: currencies whose minor unit has other than two decimals.
const CODES: [number, string][] = [
  [0, "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF"],
  [3, "BHD IQD JOD KWD LYD OMR TND"],
  [4, "CLF UYW"],
];
const MINOR_DIGITS = new Map(
  CODES.flatMap(([digits, codes]) =>
    codes.split(" ").map((code): [string, number] => [code, digits]),
  ),
);

// Decimals of a currency's minor unit.
export function minorDigits(currencyCode: string | undefined): number {
  return MINOR_DIGITS.get(currencyCode ?? "") ?? 2;
}

// Integer of a message, which omits zeros.
export function whole(value: Whole): bigint {
  return BigInt(value ?? 0);
}

// 1234567 as 1,234,567.
export function count(value: Whole): string {
  const number = whole(value);
  const digits = (number < 0n ? -number : number).toString();
  return (number < 0n ? MINUS : "") + digits.replace(/\B(?=(\d{3})+$)/g, ",");
}

// A whole number of 1/10^scale as an exact decimal, with at least `least` decimals and no trailing
// zeros beyond them.
export function decimal(value: Whole, scale: number, least = 2): string {
  const number = whole(value);
  const digits = (number < 0n ? -number : number).toString().padStart(scale + 1, "0");
  const fraction = digits
    .slice(digits.length - scale)
    .replace(/0+$/, "")
    .padEnd(least, "0");
  const text =
    count(digits.slice(0, digits.length - scale)) + (fraction && scale ? `.${fraction}` : "");
  return number < 0n ? MINUS + text : text;
}

// Maximum number of decimals of some values, to align a column.
export function places(values: Whole[], scale: number, least = 2): number {
  return values.reduce((most: number, value) => {
    const digits = whole(value)
      .toString()
      .replace("-", "")
      .padStart(scale, "0")
      .slice(-scale)
      .replace(/0+$/, "");
    return Math.max(most, digits.length);
  }, least);
}

// Amount in picos as a BigInt.
export function picosOf(money: AnyMoney): bigint {
  return whole(money?.units) * 10n ** BigInt(PICOS) + whole(money?.picos);
}

// Sum of amounts.
export function sumOf(all: AnyMoney[]): Amount {
  return {
    currencyCode: all.find(Boolean)?.currencyCode,
    picos: all.reduce((sum, each) => sum + picosOf(each), 0n),
  };
}

// An amount with the opposite sign.
export function negated(money: AnyMoney): Amount {
  return { currencyCode: money?.currencyCode, picos: -picosOf(money) };
}

// An amount without its currency: 0.00000705.
export function amount(money: AnyMoney, least = minorDigits(money?.currencyCode)): string {
  return decimal(picosOf(money), PICOS, least);
}

// The decimals of a column of amounts.
export function amountPlaces(all: AnyMoney[]): number {
  return places(
    all.map(picosOf),
    PICOS,
    minorDigits(all.find((each) => each?.currencyCode)?.currencyCode),
  );
}

// An amount with its currency; a dash where there is none.
export function money(value: AnyMoney): string {
  return value?.currencyCode ? `${amount(value)} ${value.currencyCode}` : "\u2014";
}

// Picos per token as a price per million tokens.
export function perMillion(picosPerToken: Whole): string {
  return decimal(picosPerToken, TOKENS_PER_PRICE);
}

// Ratio of two integers between 0 and 1, for bars.
export function share(part: Whole, of: Whole): number {
  const [numerator, denominator] = [whole(part), whole(of)];
  if (denominator <= 0n) return numerator > 0n ? 1 : 0;
  const parts = (numerator * 10000n) / denominator;
  return Math.min(1, Math.max(0, Number(parts) / 10000));
}

// Used and held part of a limit in whole percent, rounded down; exact for any size. A limit of zero
// is used up.
export function percentOf(used: Whole, held: Whole, limit: Whole): string {
  return whole(limit) > 0n ? count(((whole(used) + whole(held)) * 100n) / whole(limit)) : "100";
}

// Change from one amount to another in percent, to a tenth, rounded toward zero; a dash from 0.
export function percentChange(before: bigint, after: bigint): string {
  if (before === 0n) return after === 0n ? "0.0" : "\u2014";
  const tenths = ((after - before) * 1000n) / (before < 0n ? -before : before);
  return `${tenths > 0n ? "+" : ""}${decimal(tenths, 1, 1)}`;
}

// Milliseconds: 0.4 ms, 12.3 ms, 1,234 ms.
export function milliseconds(value: Float): string {
  const number = Number(value ?? 0);
  return number < 100 ? `${number.toFixed(1)} ms` : `${count(Math.round(number))} ms`;
}

// Tokens per second; a dash for none.
export function rate(value: Float): string {
  if (!value) return "\u2014";
  const [before, after] = Number(value).toFixed(1).split(".");
  return `${count(before)}.${after}`;
}

// Duration of a message ("12.500s") in seconds; null if absent.
export function secondsOf(duration: string | null | undefined): number | null {
  return duration == null ? null : Number(duration.replace(/s$/, ""));
}

const UNITS: [number, number, string][] = [
  [120, 1, "s"],
  [7200, 60, "min"],
  [172800, 3600, "h"],
];

// Wait time for display, rounded up: 0.3 s, 12 s, 4 min, 3 h, 9 d.
export function wait(seconds: number | null | undefined): string {
  if (seconds == null) return "\u2014";
  if (seconds < 1) return `${Math.max(seconds, 0).toFixed(1)} s`;
  for (const [limit, unit, name] of UNITS) {
    if (seconds < limit) return `${Math.ceil(seconds / unit)} ${name}`;
  }
  return `${Math.ceil(seconds / 86400)} d`;
}

const two = (number: number) => String(number).padStart(2, "0");

// Time in the viewer's zone, in seconds: 2026-11-22 08:15:04.
export function localTime(text: string | undefined): string {
  if (!text) return "\u2014";
  const at = new Date(text);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

// Time in UTC, for tooltips: 2026-11-22 07:15:04 UTC.
export function utcTime(text: string | undefined): string {
  return text ? `${new Date(text).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
}

// QUOTA_DIMENSION_TOKENS_PER_DAY without its prefix, in words: tokens per day.
export function words(name: string | undefined, prefix = ""): string {
  return (name ?? "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
}

// True for limits of money, in picos.
export function isMoney(dimension: string | undefined): boolean {
  return /COST_PICOS|CREDIT_PICOS/.test(dimension ?? "");
}

// Value of a limit in its unit.
export function limitValue(dimension: string | undefined, value: Whole): string {
  return isMoney(dimension) ? decimal(value, PICOS) : count(value);
}

// Name of a limit's dimension, with its unit: tokens per week, or in any 300 minutes, or in total.
export function dimensionWords(dimension: string | undefined, windowMinutes = 0): string {
  return words(dimension, "QUOTA_DIMENSION_")
    .replace(" picos", "")
    .replace(
      "per window",
      windowMinutes === 1 ? "in any minute" : `in any ${count(windowMinutes)} minutes`,
    )
    .replace("per lifetime", "in total");
}

// Control characters and direction marks, which could disguise a name. Emoji are joined by one of
// them.
const UNSEEN = new RegExp(
  [
    String.raw`(?<![\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f])\u200d`,
    String.raw`\u200d(?!\p{Extended_Pictographic})`,
    String.raw`[\u0000-\u001f\u007f-\u009f\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]`,
  ].join("|"),
  "gu",
);

// Untrusted text on one line, with invisible characters escaped.
export function plain(text: unknown): string {
  return String(text ?? "").replace(UNSEEN, "\ufffd");
}

// Argument of a command in a POSIX shell.
export function quoted(text: string): string {
  const shown = plain(text);
  return /^[\w@.=:][\w@.=:-]*$/.test(shown) ? shown : `'${shown.replaceAll("'", "'\\''")}'`;
}

// Month in UTC, `back` months before the present one.
export function monthOf(now: Date, back = 0): string {
  const at = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1));
  return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}`;
}

// Days of a month as YYYY-MM-DD.
export function daysOf(month: string): string[] {
  const [year = 0, number = 1] = month.split("-").map(Number);
  const last = new Date(Date.UTC(year, number, 0)).getUTCDate();
  return Array.from({ length: last }, (_, index) => `${month}-${two(index + 1)}`);
}

// Days from one to another, both included, as YYYY-MM-DD.
export function daysBetween(first: string, last: string): string[] {
  const days = [];
  for (let at = Date.parse(first); at <= Date.parse(last); at += DAY_MS) days.push(dayOf(at));
  return days;
}

// Day (UTC) of a time in milliseconds, `back` days before it.
export function dayOf(atMs: number, back = 0): string {
  return new Date(atMs - back * DAY_MS).toISOString().slice(0, 10);
}

// An amount in picos to read at a glance: rounded to its currency's minor unit, and exact if that
// is nearly 0.
export function brief(picos: bigint, currencyCode: string | undefined): string {
  const digits = minorDigits(currencyCode);
  const unit = 10n ** BigInt(PICOS - digits);
  return picos < unit * 100n && picos > -unit * 100n
    ? decimal(picos, PICOS, digits)
    : decimal((picos + unit / 2n) / unit, digits, digits);
}

// Wait after failures: doubled by each, up to a minute; reset by a success.
export function backedOff(usual: number, failures: number): number {
  return Math.min(usual * 2 ** Math.min(failures, 10), 60000);
}

// Entered decimal number as a whole number of 1/10^scale, exact; null if it is none or has more
// decimals.
export function scaled(entered: string, scale: number): string | null {
  const parts = /^(-?)(\d+)(?:\.(\d*))?$/.exec(entered.trim());
  const fraction = parts?.[3] ?? "";
  if (!parts || fraction.length > scale) return null;
  return BigInt(`${parts[1]}${parts[2]}${fraction.padEnd(scale, "0")}`).toString();
}
