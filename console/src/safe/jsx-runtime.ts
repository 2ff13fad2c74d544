// JSX whose texts are one line each, with invisible characters shown: names that tenants chose can
// neither hide nor turn the text around them. The compiler uses this module for every element.

import type { ReactNode } from "react";
import * as react from "react/jsx-runtime";
import { plain } from "../format.js";

export type { JSX } from "react";
export { Fragment } from "react/jsx-runtime";

function safe(children: unknown): unknown {
  if (typeof children === "string") return plain(children);
  return Array.isArray(children) ? children.map(safe) : children;
}

function safely(make: typeof react.jsx): typeof react.jsx {
  return (type, props, key) => {
    const given = props as { children?: ReactNode };
    return make(
      type,
      "children" in given && type !== "pre" && type !== "textarea"
        ? { ...given, children: safe(given.children) }
        : props,
      key,
    );
  };
}

export const jsx = safely(react.jsx);
export const jsxs = safely(react.jsxs);
