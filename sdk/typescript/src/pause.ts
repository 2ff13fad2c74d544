/** Waits that end early when somebody says so, and leave neither a timer nor a listener behind. */

import { setMaxListeners } from "node:events";

/** What a client aborts when it closes: any number of its requests may wait for that. */
export function closingController(): AbortController {
  const controller = new AbortController();
  setMaxListeners(0, controller.signal);
  return controller;
}

/** Resolves after so long, or as soon as one of the signals is aborted; whether none was. */
export function pause(milliseconds: number, signals: readonly (AbortSignal | undefined)[]): Promise<boolean> {
  const given = signals.filter((signal) => signal !== undefined);
  return new Promise((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      for (const signal of given) signal.removeEventListener("abort", end);
      resolve(!given.some((signal) => signal.aborted));
    };
    const timer = setTimeout(end, milliseconds);
    for (const signal of given) signal.addEventListener("abort", end);
    if (given.some((signal) => signal.aborted)) end();
  });
}
