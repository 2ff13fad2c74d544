/** Output received so far, by choice. */

import type { DeltaFrame } from "./gen/weir/v1/inference_service_pb.js";
import type { Choice, FinishReason, TokenLogprobs } from "./values.js";

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
export class Outputs {
  private readonly outputs: Output[] = [new Output()];

  /** Returns the output of one choice. Throws a RangeError for an impossible index. */
  of(choiceIndex: number): Output {
    if (choiceIndex < 0 || choiceIndex >= CHOICES_MAX)
      throw new RangeError(`choice ${choiceIndex} cannot be`);
    while (this.outputs.length <= choiceIndex) this.outputs.push(new Output());
    return this.outputs[choiceIndex]!;
  }
}
