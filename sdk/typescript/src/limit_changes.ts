/** Pending changes of a request's limits. */

import type { WeirError } from "./errors.js";
import type { UpdatedFrame } from "./gen/weir/v1/inference_service_pb.js";
import { errorFromStatus } from "./status.js";
import type { Limits } from "./values.js";
import * as wire from "./wire.js";

/** Changes without an answer yet, in their order. */
export class LimitChanges {
  private waiting: { resolve(limits: Limits): void; reject(error: WeirError): void }[] = [];

  /** Returns a promise for the answer to the change that is being sent. */
  expect(): Promise<Limits> {
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  /** Resolves the oldest pending change. */
  answer(frame: UpdatedFrame, requestId: string): void {
    const change = this.waiting.shift();
    if (frame.refusal) change?.reject(errorFromStatus(frame.refusal, requestId));
    else change?.resolve(wire.limits(frame));
  }

  /** Rejects all pending changes. */
  fail(error: WeirError): void {
    const left = this.waiting;
    this.waiting = [];
    for (const { reject } of left) reject(error);
  }
}
