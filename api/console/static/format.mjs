// Numbers, money and times as text. Pure: nothing here touches the page. 64-bit integers come as text and stay exact.

const MINUS = "\u2212";
const PICOS = 12;
const TOKENS_PER_PRICE = 6; // decimals: a price is told per million tokens, and given in picos per token

// A whole number of the wire, which leaves out zeros.
export function whole(value) {
  return BigInt(value ?? 0);
}

// 1234567 as 1,234,567.
export function count(value) {
  const number = whole(value);
  const digits = (number < 0n ? -number : number).toString();
  return (number < 0n ? MINUS : "") + digits.replace(/\B(?=(\d{3})+$)/g, ",");
}

// A whole number of 1/10^scale as an exact decimal, with at least `least` decimals and no needless zeros beyond them.
export function decimal(value, scale, least = 2) {
  const number = whole(value);
  const digits = (number < 0n ? -number : number).toString().padStart(scale + 1, "0");
  const fraction = digits.slice(digits.length - scale).replace(/0+$/, "").padEnd(least, "0");
  const text = count(digits.slice(0, digits.length - scale)) + (fraction && scale ? `.${fraction}` : "");
  return number < 0n ? MINUS + text : text;
}

// The decimals that the finest of some values needs, so that a column of them stands in line.
export function places(values, scale, least = 2) {
  return values.reduce((most, value) => {
    const digits = whole(value).toString().replace("-", "").padStart(scale, "0").slice(-scale).replace(/0+$/, "");
    return Math.max(most, digits.length);
  }, least);
}

// All of an amount in picos, as a BigInt.
export function picosOf(money) {
  return whole(money?.units) * 10n ** BigInt(PICOS) + whole(money?.picos);
}

// An amount without its currency: 0.00000705.
export function amount(money, least = 2) {
  return decimal(picosOf(money), PICOS, least);
}

// The decimals of a column of amounts.
export function amountPlaces(all) {
  return places(all.map(picosOf), PICOS);
}

// An amount with its currency; a dash where there is none.
export function money(value) {
  return value?.currencyCode ? `${amount(value)} ${value.currencyCode}` : "\u2014";
}

// Picos per token as a price per million tokens.
export function perMillion(picosPerToken) {
  return decimal(picosPerToken, TOKENS_PER_PRICE);
}

// Two values of the wire as a number between 0 and 1, for bars.
export function share(part, of) {
  const [numerator, denominator] = [whole(part), whole(of)];
  if (denominator <= 0n) return numerator > 0n ? 1 : 0;
  const parts = (numerator * 10000n) / denominator;
  return Math.min(1, Math.max(0, Number(parts) / 10000));
}

// Milliseconds: 0.4 ms, 12.3 ms, 1,234 ms.
export function milliseconds(value) {
  const number = value ?? 0;
  return number < 100 ? `${number.toFixed(1)} ms` : `${count(Math.round(number))} ms`;
}

// Tokens per second; a dash for none.
export function rate(value) {
  if (!value) return "\u2014";
  const [before, after] = value.toFixed(1).split(".");
  return `${count(before)}.${after}`;
}

// A duration of the wire ("12.500s") in seconds; null where there is none.
export function secondsOf(duration) {
  return duration == null ? null : Number(duration.replace(/s$/, ""));
}

// A wait for people, rounded up: 0.3 s, 12 s, 4 min, 3 h, 9 d.
export function wait(seconds) {
  if (seconds == null) return "\u2014";
  if (seconds < 1) return `${Math.max(seconds, 0).toFixed(1)} s`;
  for (const [limit, unit, name] of [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"]]) {
    if (seconds < limit) return `${Math.ceil(seconds / unit)} ${name}`;
  }
  return `${Math.ceil(seconds / 86400)} d`;
}

const two = (number) => String(number).padStart(2, "0");

// A moment in the viewer's zone to the second: 2026-11-22 08:15:04.
export function localTime(text) {
  if (!text) return "\u2014";
  const at = new Date(text);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

// The same moment in UTC, for whoever hovers: 2026-11-22 07:15:04 UTC.
export function utcTime(text) {
  return text ? `${new Date(text).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
}

// QUOTA_DIMENSION_TOKENS_PER_DAY without its prefix, in words: tokens per day.
export function words(name, prefix = "") {
  return (name ?? "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
}

// Whether a limit counts money: its values are picos then.
export function isMoney(dimension) {
  return /COST_PICOS|CREDIT_PICOS/.test(dimension ?? "");
}

// A value of a limit in the unit of what it counts.
export function limitValue(dimension, value) {
  return isMoney(dimension) ? decimal(value, PICOS) : count(value);
}

// What a limit counts, in words with its unit.
export function dimensionWords(dimension) {
  return words(dimension, "QUOTA_DIMENSION_").replace(" picos", "");
}

// Control characters and those that turn the direction of text, which could make a name look like another one.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

// Foreign text on one line, with what cannot be seen made visible.
export function plain(text) {
  return String(text ?? "").replace(UNSEEN, "\ufffd");
}

// This month in UTC, as the bill has it; `back` months before it.
export function monthOf(now, back = 0) {
  const at = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1));
  return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}`;
}

// Its days from the first to the last, as YYYY-MM-DD.
export function daysOf(month) {
  const [year, number] = month.split("-").map(Number);
  const last = new Date(Date.UTC(year, number, 0)).getUTCDate();
  return Array.from({ length: last }, (_, index) => `${month}-${two(index + 1)}`);
}

// The next wait after a failure: twice as long, up to a minute, and at once what it was when all is well.
export function backedOff(usual, failures) {
  return Math.min(usual * 2 ** Math.min(failures, 10), 60000);
}
