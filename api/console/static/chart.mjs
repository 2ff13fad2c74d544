// SVG charts: bars of a month, usage of a limit, stages of a request. A table beside each has its numbers.

import { h, svg } from "./dom.mjs";
import { milliseconds, share } from "./format.mjs";

const HEIGHT = 180, LEFT = 4, BOTTOM = 22, TOP = 8;
const WIDE = 1160, NARROW = 340, NARROW_PAGE = 704; // CSS pixels, so that text has its usual size

// Bar chart. values: [name, BigInt, text] each.
export function bars(label, values) {
  const most = values.reduce((found, [, value]) => (value > found ? value : found), 0n);
  const width = window.innerWidth < NARROW_PAGE ? NARROW : WIDE;
  const step = (width - 2 * LEFT) / values.length;
  const full = HEIGHT - TOP - BOTTOM;
  const drawn = values.map(([name, value, text], index) => {
    const height = most > 0n ? Math.max(value > 0n ? 2 : 0, share(value, most) * full) : 0;
    const x = LEFT + index * step;
    const isNamed = values.length <= 8 || index % 5 === 0;
    return svg("g", {},
      svg("title", {}, `${name}: ${text}`),
      svg("rect", { x, y: TOP, width: step, height: full, class: "behind" }),
      svg("rect", { x: x + step * 0.12, y: HEIGHT - BOTTOM - height, width: step * 0.76, height, rx: 2, class: "bar" }),
      isNamed && svg("text", { x: x + step / 2, y: HEIGHT - 6, "text-anchor": "middle" }, name.slice(-2)));
  });
  return h("figure", { class: "chart" },
    svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label },
      svg("line", { x1: LEFT, x2: width - LEFT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }), drawn),
    h("figcaption", {}, label));
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
