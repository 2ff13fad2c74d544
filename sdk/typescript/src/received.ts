/** Received data of one request: its output, its bill, and the result made of them. */

import type { DeltaFrame, FailedFrame, FinishedFrame } from "./gen/weir/v1/inference_service_pb.js";
import { Outputs } from "./output.js";
import type { Money } from "./money.js";
import type { Admitted, Delta, FinishReason, Partial, Result, Timings, Usage } from "./values.js";
import * as wire from "./wire.js";

/** Collects frames into a `Partial` or a `Result`. */
export class Received {
  admitted: Admitted | undefined;
  usage: Usage | undefined;
  cost: Money | undefined;

  private timings: Timings | undefined;
  private readonly outputs = new Outputs();

  /** `seq`: of the last frame of output. */
  constructor(
    private readonly requestId: string,
    private readonly model: string,
    public seq: number,
  ) {}

  /** Adds a frame of output and returns its delta. */
  add(frame: DeltaFrame): Delta {
    const delta = wire.delta(frame);
    this.seq = delta.seq;
    this.outputs.of(delta.choiceIndex).add(frame, delta.logprobs);
    return delta;
  }

  /** Records the settled usage and cost. */
  bill(frame: FinishedFrame | FailedFrame): void {
    this.usage = wire.usage(frame.usage);
    this.cost = wire.money(frame.cost);
  }

  /** Records the final frame and returns its reason. */
  finish(frame: FinishedFrame): FinishReason {
    this.bill(frame);
    this.timings = frame.timings && wire.timings(frame.timings);
    return wire.finishReason(frame.reason);
  }

  /** Returns the output and usage received so far. */
  partial(): Partial {
    const { text, reasoning, tokenIds } = this.outputs.of(0).choice(0, "UNSPECIFIED");
    const { requestId, model, usage, cost, timings, admitted } = this;
    return { requestId, model, text, reasoning, tokenIds, usage, cost, timings, admitted };
  }

  /** Returns the complete result, after `finish`. */
  result(frame: FinishedFrame): Result {
    const { reason, stoppedBy } = frame;
    const ends = frame.choices.length > 0 ? frame.choices : [{ choiceIndex: 0, reason, stoppedBy }];
    const choices = ends
      .map(({ choiceIndex, reason, stoppedBy }) =>
        this.outputs
          .of(choiceIndex)
          .choice(choiceIndex, wire.finishReason(reason), stoppedBy.value),
      )
      .sort((one, other) => one.index - other.index);
    const first = choices[0]!;
    return {
      requestId: this.requestId,
      model: this.model,
      finishReason: wire.finishReason(reason),
      stoppedBy: first.stoppedBy,
      text: first.text,
      tokenIds: first.tokenIds,
      logprobs: first.logprobs,
      toolCalls: first.toolCalls,
      reasoning: first.reasoning,
      choices,
      usage: wire.usage(frame.usage),
      cost: wire.money(frame.cost),
      timings: this.timings ?? wire.NO_TIMINGS,
      admitted: this.admitted,
      exhaustedQuotas: frame.exhaustedQuotas.map(wire.quota),
      receiptCount: frame.receipts.length,
      migrationCount: frame.migrationCount,
    };
  }
}
