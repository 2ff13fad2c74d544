/** Exact amounts. */

/** Picos (1e-12) in one unit of a currency. */
export const PICOS_PER_UNIT = 1_000_000_000_000n;

// ISO 4217: currencies whose minor unit has other than two decimals.
const CODES_BY_MINOR_DIGITS: readonly (readonly [number, string])[] = [
  [0, "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF"],
  [3, "BHD IQD JOD KWD LYD OMR TND"],
  [4, "CLF UYW"],
];
const MINOR_DIGITS = new Map(
  CODES_BY_MINOR_DIGITS.flatMap(([digits, codes]) =>
    codes.split(" ").map((code) => [code, digits] as const),
  ),
);

/**
 * Returns the value with a `toJSON` that writes its `bigint`s as strings: JSON has no exact numbers
 * of this size, and `JSON.stringify` would throw.
 */
export function jsonable<T extends object>(value: T): T {
  const exact = (each: unknown): unknown =>
    typeof each === "bigint" ? each.toString() : Array.isArray(each) ? each.map(exact) : each;
  const toJSON = function (this: T): Record<string, unknown> {
    return Object.fromEntries(Object.entries(this).map(([name, each]) => [name, exact(each)]));
  };
  return Object.defineProperty(value, "toJSON", { value: toJSON, enumerable: false });
}

/** An exact amount of money. */
export class Money {
  /** `picos`: whole picos (1e-12) of one unit of the currency. */
  constructor(
    readonly currencyCode: string,
    readonly picos: bigint,
  ) {}

  /**
   * Returns an amount in units of the currency. Throws a RangeError if invalid or finer than a
   * pico.
   */
  static of(amount: string, currencyCode: string): Money {
    const [, sign, units, fraction = ""] = /^(-?)(\d+)(?:\.(\d+))?$/.exec(amount) ?? [];
    const digits = fraction.replace(/0+$/, "");
    if (units === undefined || digits.length > 12) {
      throw new RangeError(
        `'${amount}' is not an amount in whole picos: give a string like "0.05"`,
      );
    }
    const picos = BigInt(units) * PICOS_PER_UNIT + BigInt(digits.padEnd(12, "0"));
    return new Money(currencyCode, sign === "-" ? -picos : picos);
  }

  /** The amount in units as an exact decimal, with at least the currency's: `0.00184`. */
  get amount(): string {
    const magnitude = this.picos < 0n ? -this.picos : this.picos;
    const fraction = (magnitude % PICOS_PER_UNIT)
      .toString()
      .padStart(12, "0")
      .replace(/0+$/, "")
      .padEnd(MINOR_DIGITS.get(this.currencyCode) ?? 2, "0");
    const units = `${this.picos < 0n ? "-" : ""}${magnitude / PICOS_PER_UNIT}`;
    return fraction ? `${units}.${fraction}` : units;
  }

  /** `0.00184 USD`. */
  toString(): string {
    return `${this.amount} ${this.currencyCode}`;
  }

  /** Returns both parts as strings: JSON has no exact numbers of this size. */
  toJSON(): { currencyCode: string; picos: string } {
    return { currencyCode: this.currencyCode, picos: this.picos.toString() };
  }
}
