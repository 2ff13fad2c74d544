// SVG charts: bars of a month, usage of a limit, stages of a request. A table beside each has its numbers.

import { h, svg } from "./dom.mjs";
import { milliseconds, share } from "./format.mjs";

const HEIGHT = 220, RIGHT = 4, BOTTOM = 22, TOP = 16, LABEL = 7; // LABEL: width of a character
const WIDE = 1160, NARROW = 340, NARROW_PAGE = 704; // CSS pixels, so that text has its usual size
const TICKS = 4, NAMED = { [WIDE]: 20, [NARROW]: 7 }; // most ticks of the y axis, and names of bars
export const SERIES_MAX = 6; // colours

// Stacked bars with a y axis. values: [name, BigInt of each series] each; series: their names; text: formats a value.
export function bars(label, values, series, text) {
  const sums = values.map(([, parts]) => parts.reduce((sum, part) => sum + part, 0n));
  const most = sums.reduce((found, value) => (value > found ? value : found), 0n);
  const width = window.innerWidth < NARROW_PAGE ? NARROW : WIDE;
  const marks = ticks(most);
  const top = marks.at(-1), full = HEIGHT - TOP - BOTTOM;
  const left = 10 + LABEL * Math.max(...marks.map((mark) => text(mark).length));
  const step = (width - left - RIGHT) / values.length;
  const heightOf = (value) => (top > 0n ? share(value, top) * full : 0);
  const every = Math.ceil(values.length / NAMED[width]);
  const drawn = values.map(([name, parts], index) => {
    const x = left + index * step;
    let y = HEIGHT - BOTTOM;
    const stack = parts.map((value, number) => {
      const height = value > 0n ? Math.max(1, heightOf(value)) : 0;
      y -= height;
      return height > 0 && svg("rect", { x: x + step * 0.12, y, width: step * 0.76, height, class: `bar series-${number}` });
    });
    const named = parts.map((value, number) => value > 0n && series.length > 1 && `${series[number]}: ${text(value)}`).filter(Boolean);
    return svg("g", {},
      svg("title", {}, [`${name}: ${text(sums[index])}`, ...named].join("\n")),
      svg("rect", { x, y: TOP, width: step, height: full, class: "behind" }), stack,
      index % every === 0 && svg("text", { x: x + step / 2, y: HEIGHT - 6, "text-anchor": "middle" }, name.slice(values.length > 31 ? 5 : -2)));
  });
  const axis = marks.map((mark) => {
    const y = HEIGHT - BOTTOM - heightOf(mark);
    return [svg("line", { x1: left, x2: width - RIGHT, y1: y, y2: y, class: "axis" }), svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text(mark))];
  });
  return h("figure", { class: "chart" },
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${label}, at most ${text(most)}` }, axis, drawn),
    h("figcaption", {}, label, series.length > 1 && h("ul", { class: "legend" }, series.map((name, number) => h("li", {}, h("span", { class: `swatch series-${number}` }), name)))));
}

// Marks of an axis from 0 to at least `most`, at multiples of 1, 2 or 5 times a power of ten.
export function ticks(most) {
  if (most <= 0n) return [0n];
  let unit = 1n, step = 1n;
  while (step * BigInt(TICKS) < most) {
    const factor = step / unit;
    if (factor === 5n) unit *= 10n;
    step = factor === 5n ? unit : factor === 2n ? 5n * unit : 2n * unit;
  }
  return Array.from({ length: Number((most + step - 1n) / step) + 1 }, (_, index) => step * BigInt(index));
}

// Used and held parts of a limit.
export function meter(used, held, limit) {
  const first = share(used, limit), second = Math.min(share(held, limit), 1 - first);
  const kind = first + second >= 1 ? "full" : first + second >= 0.8 ? "near" : "";
  const text = `${Math.round(first * 100)} % used, ${Math.round(second * 100)} % held`;
  return svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: `meter ${kind}`, role: "img", "aria-label": text },
    svg("title", {}, text),
    svg("rect", { x: 0, y: 0, width: 100, height: 8, rx: 2, class: "behind" }),
    svg("rect", { x: 0, y: 0, width: first * 100, height: 8, rx: 2, class: "bar" }),
    svg("rect", { x: first * 100, y: 0, width: second * 100, height: 8, class: "held" }));
}

// One stage on the time axis of a request.
export function span(startMs, lengthMs, totalMs, name) {
  const width = lengthMs > 0 ? Math.max(0.4, (100 * lengthMs) / totalMs) : 0;
  return svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: "span", role: "img", "aria-label": `${name}: from ${milliseconds(startMs)}` },
    svg("rect", { x: 0, y: 0, width: 100, height: 8, rx: 1, class: "behind" }),
    svg("rect", { x: Math.min((100 * startMs) / totalMs, 100 - width), y: 0, width, height: 8, class: `bar ${name.replace(" ", "-")}` }));
}
