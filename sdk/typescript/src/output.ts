/** Received data of one request: its output by choice, its bill, and the result made of them. */

import type { DeltaFrame, FailedFrame, FinishedFrame } from "./gen/weir/v1/inference_service_pb.js";
import type { Money } from "./money.js";
import type { FinishReason, Timings, TokenLogprobs, Usage } from "./generated_values.js";
import type { Admitted, Choice, Delta, Partial, Result } from "./values.js";
import * as wire from "./wire.js";

const CHOICES_MAX = 1024; // far above a server's limit: a wrong index must not exhaust memory

/** Received output of one choice. */
class Output {
  private readonly texts: string[] = [];
  private readonly thoughts: string[] = [];
  private readonly tokenIds: number[] = [];
  private readonly logprobs: TokenLogprobs[] = [];
  private readonly calls: { id: string; name: string; pieces: string[] }[] = [];

  add(frame: DeltaFrame, logprobs: readonly TokenLogprobs[]): void {
    this.texts.push(frame.text);
    this.thoughts.push(frame.reasoning);
    for (const tokenId of frame.tokenIds) this.tokenIds.push(tokenId);
    for (const each of logprobs) this.logprobs.push(each);
    for (const { id, name, argumentsJson } of frame.toolCalls) {
      if (id !== "") this.calls.push({ id, name, pieces: [] });
      this.calls.at(-1)?.pieces.push(argumentsJson);
    }
  }

  choice(index: number, finishReason: FinishReason, stoppedBy?: string | number): Choice {
    const toolCalls = this.calls.map(({ id, name, pieces }) => ({
      id,
      name,
      argumentsJson: pieces.join(""),
    }));
    return {
      index,
      finishReason,
      text: this.texts.join(""),
      tokenIds: [...this.tokenIds],
      logprobs: [...this.logprobs],
      toolCalls,
      reasoning: this.thoughts.join(""),
      stoppedBy,
    };
  }
}

/** Received output of all choices; their number follows from the frames. */
class Outputs {
  private readonly outputs: Output[] = [new Output()];

  /** Returns the output of one choice. Throws a RangeError for an impossible index. */
  of(choiceIndex: number): Output {
    if (choiceIndex < 0 || choiceIndex >= CHOICES_MAX)
      throw new RangeError(`choice ${choiceIndex} cannot be`);
    while (this.outputs.length <= choiceIndex) this.outputs.push(new Output());
    return this.outputs[choiceIndex]!;
  }
}

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
    const { requestId, usage, cost, timings, admitted } = this;
    const model = admitted?.requestedModel ? admitted.model : this.model;
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
      model: frame.requestedModel ? frame.model : this.model,
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
      exhaustedQuotas: frame.exhaustedQuotas.map(wire.quotaStatus),
      receiptCount: frame.receipts.length,
      migrationCount: frame.migrationCount,
      requestedModel: frame.requestedModel,
    };
  }
}
