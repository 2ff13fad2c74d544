/** Waits that can end early and leave neither a timer nor a listener behind. */

import { setMaxListeners } from "node:events";

/** Returns the controller that a client aborts when it closes, without a limit of listeners. */
export function closingController(): AbortController {
  const controller = new AbortController();
  setMaxListeners(0, controller.signal);
  return controller;
}

/** Waits for a time, or until one of the signals is aborted; resolves to whether none was. */
export function pause(
  milliseconds: number,
  signals: readonly (AbortSignal | undefined)[],
): Promise<boolean> {
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
