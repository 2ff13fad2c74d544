/** Conversion of scalar wire values: counts, times, names and amounts. */

import { type Duration, type Timestamp, timestampMs } from "@bufbuild/protobuf/wkt";
import {
  FinishReason as FinishReasonMessage,
  type Money as MoneyMessage,
  QuotaDimension as QuotaDimensionMessage,
} from "./gen/weir/v1/types_pb.js";
import { type FinishReason, QUOTA_DIMENSIONS, type QuotaDimension } from "./generated_values.js";
import { Money, PICOS_PER_UNIT } from "./money.js";

/** Returns a count as a plain number. Throws a RangeError if it is not exact. */
export function count(value: bigint): number {
  const number = Number(value);
  if (!Number.isSafeInteger(number))
    throw new RangeError(`${value} is more than a number can hold exactly`);
  return number;
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
