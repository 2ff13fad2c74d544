// Charts: bars of a month with uPlot, usage of a limit, stages of a request. A table beside each has
// its exact numbers; a chart rounds to pixels.

import { useEffect, useRef, useState } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { localTime, milliseconds, share } from "../format.js";
import { text } from "../texts.js";

const HEIGHT = 240;
const AXIS = 28; // height of the x axis
const TICKS = 4; // most intervals of the y axis
const LETTER = 7; // width of a character of an axis, in CSS pixels
export const SERIES_MAX = 6; // colours

// Marks of an axis from 0 to at least `most`, at multiples of 1, 2 or 5 times a power of ten.
export function ticks(most: bigint): bigint[] {
  if (most <= 0n) return [0n];
  let [unit, step] = [1n, 1n];
  while (step * BigInt(TICKS) < most) {
    const factor = step / unit;
    if (factor === 5n) unit *= 10n;
    step = factor === 5n ? unit : factor === 2n ? 5n * unit : 2n * unit;
  }
  return Array.from(
    { length: Number((most + step - 1n) / step) + 1 },
    (_, index) => step * BigInt(index),
  );
}

export interface Stacked {
  label: string;
  values: [string, bigint[]][]; // name, and value of each series
  series: string[];
  shown: (value: bigint) => string;
}

const total = (parts: bigint[]) => parts.reduce((sum, each) => sum + each, 0n);

// Data of stacked bars: series from the top of the stack down, each with the ones below it.
export function stacks(values: [string, bigint[]][], seriesCount: number): number[][] {
  return Array.from({ length: seriesCount }, (_, back) =>
    values.map(([, parts]) => Number(total(parts.slice(0, seriesCount - back)))),
  );
}

// Colours of the style sheet, which change with the colour scheme.
function colour(element: Element, name: string): string {
  return getComputedStyle(element).getPropertyValue(name).trim();
}

// Stacked bars with a y axis. The pointed bar's exact values stand below.
export function Bars({ label, values, series, shown }: Stacked) {
  const place = useRef<HTMLDivElement>(null);
  const [pointed, setPointed] = useState<number | null>(null);
  const [scheme, setScheme] = useState(0);
  const most = values.reduce(
    (found, [, parts]) => (total(parts) > found ? total(parts) : found),
    0n,
  );
  useEffect(() => {
    const media = window.matchMedia("(prefers-color-scheme: dark)");
    const change = () => setScheme((before) => before + 1);
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);
  const key = JSON.stringify([
    label,
    series,
    values.map(([name, parts]) => [name, parts.map(String)]),
  ]);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const marks = ticks(most);
    const left = 14 + LETTER * Math.max(...marks.map((mark) => shown(mark).length));
    const width = () => Math.max(280, element.clientWidth);
    const axis = {
      stroke: colour(element, "--faint"),
      ticks: { show: false },
      font: "12px system-ui",
    };
    const line = { stroke: colour(element, "--line"), width: 1 };
    const plot = new uPlot(
      {
        width: width(),
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
        scales: {
          x: { time: false, range: () => [-0.6, values.length - 0.4] },
          y: { range: () => [0, Number(marks.at(-1) ?? 0n) || 1] },
        },
        axes: [
          {
            ...axis,
            grid: { show: false },
            size: AXIS,
            splits: () => values.map((_, index) => index),
            values: (plot) => {
              const every = Math.ceil(
                values.length / Math.max(3, Math.floor((plot.width - left) / 44)),
              );
              return values.map(([name], index) =>
                index % every ? "" : name.slice(values.length > 31 ? 5 : -2),
              );
            },
          },
          {
            ...axis,
            size: left,
            grid: line,
            splits: () => marks.map(Number),
            values: () => marks.map(shown),
          },
        ],
        series: [
          {},
          ...series.map((name, index) => ({
            label: name,
            fill: colour(element, `--series-${series.length - 1 - index}`),
            paths: uPlot.paths.bars!({ size: [0.76, 64] }),
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [(plot) => setPointed(plot.cursor.idx ?? null)] },
      },
      [values.map((_, index) => index), ...stacks(values, series.length)] as uPlot.AlignedData,
      element,
    );
    const observer = new ResizeObserver(() => plot.setSize({ width: width(), height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [key, scheme]);
  const [name, parts] = (pointed === null ? undefined : values[pointed]) ?? ["", []];
  return (
    <figure className="chart">
      <div ref={place} role="img" aria-label={text.chart.atMost(label, shown(most))} />
      <figcaption>
        {name ? `${name}: ${shown(total(parts))}` : label}
        {series.length > 1 && (
          <ul className="legend">
            {series.map((each, index) => (
              <li key={each}>
                <span className={`swatch series-${index}`} />
                {each}
                {name && `: ${shown(parts[index] ?? 0n)}`}
              </li>
            ))}
          </ul>
        )}
      </figcaption>
    </figure>
  );
}

// Distances of the marks of a time axis: minutes, then hours.
const TIME_MARKS_S = [60, 300, 900, 3600, 4 * 3600];
const INTEGERS = Array.from({ length: 9 }, (_, power) =>
  [1, 2, 5].map((unit) => unit * 10 ** power),
).flat();

// Hours and minutes in the reader's zone.
function clock(at: Date): string {
  return localTime(at.toISOString()).slice(11, 16);
}

export interface Sample {
  at: number; // milliseconds
  values: (number | null)[];
}

// Lines over the last `spanS` seconds, newest at the right. A gap is a time without a value.
export function Lines({
  label,
  samples,
  series,
  shown,
  spanS,
}: {
  label: string;
  samples: Sample[];
  series: string[];
  shown: (value: number) => string;
  spanS: number;
}) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [scheme, setScheme] = useState(0);
  useEffect(() => {
    const media = window.matchMedia("(prefers-color-scheme: dark)");
    const change = () => setScheme((before) => before + 1);
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const axis = {
      stroke: colour(element, "--faint"),
      ticks: { show: false },
      font: "12px system-ui",
    };
    const grid = { stroke: colour(element, "--line"), width: 1 };
    const made = new uPlot(
      {
        width: Math.max(240, element.clientWidth),
        height: 140,
        legend: { show: false },
        cursor: { show: false },
        scales: {
          x: { range: (_plot, _first, last) => [last - spanS, last] },
          y: { range: (_plot, _low, high) => [0, Math.max(1, high ?? 1) * 1.1] },
        },
        axes: [
          {
            ...axis,
            grid: { show: false },
            size: AXIS,
            incrs: TIME_MARKS_S,
            values: (_plot, marks) => marks.map((mark) => clock(new Date(mark * 1000))),
          },
          { ...axis, grid, size: 64, incrs: INTEGERS, values: (_plot, marks) => marks.map(shown) },
        ],
        series: [
          {},
          ...series.map((name, index) => ({
            label: name,
            stroke: colour(element, `--series-${index}`),
            width: 2,
            points: { show: false },
          })),
        ],
      },
      [[], ...series.map(() => [])] as uPlot.AlignedData,
      element,
    );
    plot.current = made;
    const observer = new ResizeObserver(() =>
      made.setSize({ width: Math.max(240, element.clientWidth), height: 140 }),
    );
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [scheme, series.length, spanS]);
  useEffect(() => {
    const times = samples.map((each) => each.at / 1000);
    plot.current?.setData([
      times,
      ...series.map((_, index) => samples.map((each) => each.values[index] ?? null)),
    ] as uPlot.AlignedData);
  }, [samples, scheme, spanS]);
  const latest =
    samples.at(-1)?.values.map((each) => (each === null ? text.none : shown(each))) ?? [];
  return (
    <figure className="chart">
      <div ref={place} role="img" aria-label={`${label}: ${latest.join(", ")}`} />
      <figcaption>
        {label}
        <ul className="legend">
          {series.map((each, index) => (
            <li key={each}>
              <span className={`swatch series-${index}`} />
              {each}: {latest[index] ?? text.none}
            </li>
          ))}
        </ul>
      </figcaption>
    </figure>
  );
}

// Used and held parts of a limit.
export function Meter({
  used,
  held,
  limit,
}: {
  used: string | undefined;
  held: string | undefined;
  limit: string | undefined;
}) {
  const first = share(used, limit);
  const second = Math.min(share(held, limit), 1 - first);
  const kind = first + second >= 1 ? "full" : first + second >= 0.8 ? "near" : "";
  return (
    <svg
      viewBox="0 0 100 8"
      preserveAspectRatio="none"
      className={`meter ${kind}`}
      role="img"
      aria-label={text.chart.meter(Math.round(first * 100), Math.round(second * 100))}
    >
      <rect x="0" y="0" width="100" height="8" rx="2" className="behind" />
      <rect x="0" y="0" width={first * 100} height="8" rx="2" className="bar" />
      <rect x={first * 100} y="0" width={second * 100} height="8" className="held" />
    </svg>
  );
}

// One stage on the time axis of a request.
export function Span({
  start,
  length,
  all,
  name,
}: {
  start: number;
  length: number;
  all: number;
  name: string;
}) {
  const width = length > 0 ? Math.max(0.4, (100 * length) / all) : 0;
  return (
    <svg
      viewBox="0 0 100 8"
      preserveAspectRatio="none"
      className="span"
      role="img"
      aria-label={text.chart.span(name, milliseconds(start))}
    >
      <rect x="0" y="0" width="100" height="8" rx="1" className="behind" />
      <rect
        x={Math.min((100 * start) / all, 100 - width)}
        y="0"
        width={width}
        height="8"
        rx="1"
        className={`bar ${name.replace(" ", "-")}`}
      />
    </svg>
  );
}
