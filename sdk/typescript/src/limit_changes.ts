/** The changes of a request's limits that were asked for and not answered yet. */

import type { WeirError } from "./errors.js";
import type { UpdatedFrame } from "./gen/weir/v1/inference_service_pb.js";
import { errorFromStatus } from "./status.js";
import type { Limits } from "./values.js";
import * as wire from "./wire.js";

/** The server answers them in their order. */
export class LimitChanges {
  private waiting: { resolve(limits: Limits): void; reject(error: WeirError): void }[] = [];

  /** The answer to the change that is asked for now. */
  expect(): Promise<Limits> {
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  /** The server has answered the oldest. */
  answer(frame: UpdatedFrame, requestId: string): void {
    const change = this.waiting.shift();
    if (frame.refusal) change?.reject(errorFromStatus(frame.refusal, requestId));
    else change?.resolve(wire.limits(frame));
  }

  /** No answer comes any more. */
  fail(error: WeirError): void {
    const left = this.waiting;
    this.waiting = [];
    for (const { reject } of left) reject(error);
  }
}
