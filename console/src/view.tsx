// A shown page: its parameters in the address, its permissions, and its calls.

import { createContext, useCallback, useContext, useEffect, useRef, useState } from "react";
import type { ReactNode } from "react";
import { CallFailed, call } from "./client.js";
import type { Name, Request, Response, Session } from "./client.js";
import { backedOff, wait } from "./format.js";
import { Empty, Problem } from "./parts/basics.js";
import { text } from "./texts.js";

export interface Page {
  id: string;
  title: string;
  calls: Name[]; // with a permission for one of them, the page is listed
  Show: () => ReactNode;
}

export type Caller = <Call extends Name>(
  name: Call,
  request?: Request<Call>,
) => Promise<Response<Call>>;

export interface View {
  page: Page;
  session: Session;
  params: URLSearchParams;
  asked: (name: string) => string; // a parameter; empty if absent
  may: (name: Name) => boolean;
  address: (changes: Record<string, string>) => string;
  go: (changes: Record<string, string>) => void;
  say: (message: string) => void; // to the status line, which screen readers announce
  signedOut: () => void;
}

export const ViewContext = createContext<View | null>(null);

export function useView(): View {
  const view = useContext(ViewContext);
  if (!view) throw new Error("a part of a page is outside of its view");
  return view;
}

// Address of a page. Empty parameters are left out.
export function addressOf(page: string, params: Record<string, string | undefined>): string {
  const query = new URLSearchParams(
    Object.entries(params).filter((each): each is [string, string] => Boolean(each[1])),
  ).toString();
  return `#/${page}${query && `?${query}`}`;
}

interface Found<Data> {
  data: Data | null;
  error: unknown;
  failures: number;
}

export interface Loaded<Data> extends Found<Data> {
  reload: () => void;
}

// Load data for a page, again whenever the address changes; `everyMs`: repeatedly while the page is
// visible, less often after failures. Calls end when the page is left.
export function useLoaded<Data>(
  load: (caller: Caller) => Promise<Data>,
  deps: unknown[] = [],
  everyMs = 0,
): Loaded<Data> {
  const view = useView();
  const [found, setFound] = useState<Found<Data>>({ data: null, error: null, failures: 0 });
  const [turn, setTurn] = useState(0);
  const shown = useRef("");
  const key = JSON.stringify([view.page.id, view.params.toString(), ...deps]);
  useEffect(() => {
    const left = new AbortController();
    let timer = 0;
    let failures = 0;
    let isRunning = false;
    const isOther = shown.current !== key;
    shown.current = key;
    if (isOther) setFound({ data: null, error: null, failures: 0 });
    const next = () => {
      if (everyMs && !left.signal.aborted)
        timer = window.setTimeout(run, backedOff(everyMs, failures));
    };
    const run = async () => {
      if (isRunning) return;
      if (document.hidden && everyMs) return next();
      isRunning = true;
      try {
        const data = await load((name, request) => call(name, request ?? {}, left.signal));
        failures = 0;
        if (!left.signal.aborted) setFound({ data, error: null, failures });
      } catch (error) {
        if (left.signal.aborted) return;
        failures += 1;
        if (error instanceof CallFailed && error.httpStatus === 401) return view.signedOut();
        setFound((before) => ({ ...before, error, failures }));
      } finally {
        isRunning = false;
      }
      return next();
    };
    const resume = () => {
      if (everyMs && !document.hidden) {
        window.clearTimeout(timer);
        void run();
      }
    };
    document.addEventListener("visibilitychange", resume);
    void run();
    return () => {
      left.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", resume);
    };
    // `load` is a new function in each rendering; `key` says when its result changes.
  }, [key, turn, everyMs]);
  const reload = useCallback(() => setTurn((before) => before + 1), []);
  return { ...found, reload };
}

// Show data once it is loaded; its latest error stands above it.
export function Show<Data>({
  of,
  everyMs = 0,
  children,
}: {
  of: Loaded<Data>;
  everyMs?: number;
  children: (data: Data) => ReactNode;
}) {
  if (of.data === null) return of.error ? <Problem of={of.error} /> : <Empty>{text.loading}</Empty>;
  const isOld = of.error && everyMs;
  return (
    <>
      {isOld ? (
        <p className="remark warning" role="status">
          {text.errors.old(
            (of.error as Error).message,
            wait(backedOff(everyMs, of.failures) / 1000),
          )}
        </p>
      ) : (
        of.error && <Problem of={of.error} />
      )}
      {children(of.data)}
    </>
  );
}

// A value, or the error of the call for it: a part that fails leaves the others.
export type Tried<Data> = { value: Data } | { error: unknown };

export async function tried<Data>(made: Promise<Data>): Promise<Tried<Data>> {
  return made.then(
    (value) => ({ value }),
    (error: unknown) => ({ error }),
  );
}
