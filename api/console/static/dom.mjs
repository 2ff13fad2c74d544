// DOM builders. Text becomes text nodes, never markup.

import { localTime, plain, utcTime } from "./format.mjs";

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === false || child == null) continue;
    made.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return made;
}

// Element. Function attributes are event listeners.
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

// An element of SVG.
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// Time in the viewer's zone, with UTC as its title.
export function time(text) {
  return text ? h("time", { datetime: text, title: utcTime(text) }, localTime(text)) : "\u2014";
}

// Id, key prefix or digest; nothing for an empty text.
export function id(text) {
  return text ? h("span", { class: "id" }, text) : "";
}

// Column: head, whether it is numeric, and the cell of a row.
export function column(head, cell, numeric = false) {
  return { head, cell, numeric };
}

// A table with heads; on narrow screens each row is a card whose cells carry their heads, or it scrolls if it is a
// grid. Roles are named since cards lose them.
export function table(caption, columns, rows, { empty = "Nothing.", foot = null, key = null, isGrid = false } = {}) {
  if (rows.length === 0 && !foot) return h("p", { class: "empty" }, empty);
  const heads = columns.map(({ head, numeric }) => h("th", { scope: "col", role: "columnheader", class: numeric && "number" }, head));
  const body = rows.map((row) => h("tr", { role: "row", "data-key": key && key(row) }, cellsOf(columns, row)));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", { role: "table", class: isGrid ? "grid" : "cards" },
      h("caption", { class: "unseen" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
      h("tbody", { role: "rowgroup" }, body),
      foot && h("tfoot", { role: "rowgroup" }, h("tr", { role: "row" }, cellsOf(columns, foot)))));
}

function cellsOf(columns, row) {
  return columns.map(({ head, cell, numeric }) => {
    const content = cell(row);
    const isEmpty = content === "" || content == null;
    return h("td", { role: "cell", "data-head": head, class: [numeric && "number", isEmpty && "void"].filter(Boolean).join(" ") || null },
      h("div", { class: "value" }, content));
  });
}

// Tile: a figure with its name and unit.
export function tile(name, value, unit = "", note = "") {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("span", { class: "figure" }, value), unit && ` ${unit}`),
    note && h("dd", { class: "note" }, note));
}

// Row of tiles.
export function tiles(...all) {
  return h("dl", { class: "tiles" }, all);
}

// Message box. kind: good, warning or bad.
export function remark(kind, ...children) {
  return h("p", { class: `remark ${kind}`, role: kind === "bad" ? "alert" : null }, children);
}

// Coloured label.
export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

// Equivalent command of the terminal.
export function command(what, text) {
  return h("p", { class: "command" }, what, ": ", h("code", {}, text));
}

// Labelled selection. options: [value, text] each.
export function choice(name, options, chosen, changed) {
  const made = h("select", { change: () => changed(made.value) },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
  return h("label", { class: "field" }, h("span", {}, name), made);
}

// Labelled text input.
export function field(name, attributes) {
  return h("label", { class: "field" }, h("span", {}, name), h("input", attributes));
}

// Replace content; keep focus, by `data-key`, and scroll positions.
export function swap(place, ...children) {
  const focused = place.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  const scrolled = [...place.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  place.replaceChildren(...children.flat(Infinity).filter(Boolean));
  [...place.querySelectorAll(".scroll")].forEach((each, index) => { each.scrollLeft = scrolled[index] ?? 0; });
  if (focused !== null) [...place.querySelectorAll("button, a, input, select, [tabindex]")].find((each) => keyOf(each) === focused)?.focus();
}

function keyOf(element) {
  return `${element.tagName} ${element.closest("[data-key]")?.dataset.key ?? ""} ${element.getAttribute("aria-label") ?? ""}`;
}

// Confirm an irreversible action. Resolves to the entered text, or null.
export function confirm(title, explanation, act, reasonName) {
  return new Promise((resolve) => {
    const reason = h("input", { type: "text", maxlength: 200, autocomplete: "off" });
    const dialog = h("dialog", { "aria-labelledby": "dialog-title", close: () => {
      dialog.remove();
      resolve(dialog.returnValue === "act" ? reason.value : null);
    } },
    h("h2", { id: "dialog-title" }, title), h("p", {}, explanation),
    h("label", { class: "field wide" }, h("span", {}, reasonName), reason),
    h("div", { class: "buttons" },
      h("button", { type: "button", click: () => dialog.close("") }, "Keep"),
      h("button", { type: "button", class: "danger", click: () => dialog.close("act") }, act)));
    document.body.append(dialog);
    dialog.showModal();
  });
}
