/** Conversion of scalar wire values: counts, times, names and amounts. */

import { type Duration, durationFromMs, type Timestamp, timestampMs } from "@bufbuild/protobuf/wkt";
import {
  FinishReason as FinishReasonMessage,
  type Money as MoneyMessage,
  QuotaDimension as QuotaDimensionMessage,
} from "./gen/weir/v1/types_pb.js";
import { UsageGrouping } from "./gen/weir/v1/usage_reports_pb.js";
import { type FinishReason, QUOTA_DIMENSIONS, type QuotaDimension } from "./generated_values.js";
import { invalid } from "./checks.js";
import { Money, PICOS_PER_UNIT } from "./money.js";

/** What a grouping by a label begins with, before its key. */
export const LABEL_PREFIX = "label:";

/** Returns a count as a plain number. Throws a RangeError if it is not exact. */
export function count(value: bigint): number {
  const number = Number(value);
  if (!Number.isSafeInteger(number))
    throw new RangeError(`${value} is more than a number can hold exactly`);
  return number;
}

/** Returns an object without its undefined members. */
export function defined<Init extends object>(
  init: Init,
): { [Name in keyof Init]: Exclude<Init[Name], undefined> } {
  const members = Object.entries(init).filter(([, value]) => value !== undefined);
  return Object.fromEntries(members) as { [Name in keyof Init]: Exclude<Init[Name], undefined> };
}

/** Returns a whole number as the contract's integer. Throws InvalidRequest for a fraction. */
export function whole(field: string, value: number | bigint | undefined): bigint | undefined {
  if (value === undefined || typeof value === "bigint") return value;
  if (!Number.isSafeInteger(value))
    throw invalid(field, `must be a whole number, above 2^53 a bigint, not ${value}`);
  return BigInt(value);
}

/** Returns the message of a duration. Throws InvalidRequest if it is not a number. */
export function duration(field: string, ms: number | undefined): Duration | undefined {
  if (ms === undefined) return undefined;
  if (!Number.isFinite(ms)) throw invalid(field, `must be a number of milliseconds, not ${ms}`);
  return durationFromMs(ms);
}

/** Returns the number of a name in an enumeration. Throws InvalidRequest for an unknown name. */
export function numberOf<Numbers extends Record<string, string | number>>(
  field: string,
  numbers: Numbers,
  name: string,
): Extract<Numbers[keyof Numbers], number> {
  const names = Object.keys(numbers).filter((each) => Number.isNaN(Number(each)));
  const spelled = (each: string): string => each.replace("_PICOS", "").replaceAll("_", "-");
  const found = names.find((each) => spelled(each) === spelled(name.toUpperCase()));
  if (found === undefined) {
    const known = names.slice(1).map((each) => spelled(each).toLowerCase());
    throw invalid(field, `must be one of ${known.join(", ")}, not "${name}"`);
  }
  return numbers[found] as Extract<Numbers[keyof Numbers], number>;
}

/**
 * Returns the groupings of a report, and the key of the label of `label:KEY`. Throws InvalidRequest
 * for an unknown grouping, and for a second label.
 */
export function usageGroups(
  field: string,
  by: readonly string[],
): { groupBy: UsageGrouping[]; labelKey: string } {
  const labels = by.filter((each) => each.startsWith(LABEL_PREFIX));
  if (labels.length > 1)
    throw invalid(field, "must have at most one label: ask once for each of them");
  const groupBy = by.map((each) =>
    labels.includes(each) ? UsageGrouping.LABEL : numberOf(field, UsageGrouping, each),
  );
  return { groupBy, labelKey: labels[0]?.slice(LABEL_PREFIX.length) ?? "" };
}

/** Returns a duration in milliseconds. */
export function durationMs(value: Duration | undefined): number | undefined {
  return value === undefined ? undefined : count(value.seconds) * 1000 + value.nanos / 1e6;
}

export function date(value: Timestamp | undefined): Date | undefined {
  return value === undefined ? undefined : new Date(timestampMs(value));
}

/** Returns a name; those unknown to this version of the client become UNSPECIFIED. */
export function name<Name extends string>(names: Record<number, string>, value: number): Name {
  return (names[value] ?? "UNSPECIFIED") as Name;
}

/** Returns a name as the other clients spell it: in lower case, with hyphens. */
export function word<Word extends string>(names: Record<number, string>, value: number): Word {
  return name<string>(names, value).toLowerCase().replaceAll("_", "-") as Word;
}

/** Returns a dimension by its name; "unspecified" for one that is newer than this client. */
export function dimensionNamed(text: string): QuotaDimension {
  return QUOTA_DIMENSIONS.find((each) => each === text) ?? "unspecified";
}

export function dimension(value: QuotaDimensionMessage): QuotaDimension {
  const spelling = name<string>(QuotaDimensionMessage, value).replace("_PICOS", "");
  return dimensionNamed(spelling.replaceAll("_", "-").toLowerCase());
}

export function finishReason(value: FinishReasonMessage): FinishReason {
  return name<FinishReason>(FinishReasonMessage, value);
}

export function money(value: MoneyMessage | undefined): Money {
  return value === undefined
    ? new Money("", 0n)
    : new Money(value.currencyCode, value.units * PICOS_PER_UNIT + value.picos);
}
