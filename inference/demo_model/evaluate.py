"""Score greedy answers on names and listings that training never saw.

`python -m inference.demo_model.evaluate --model DIR --cases N` prints a table by kind of question, and with `--show N` some
answers. Uses the `transformers` implementation, so that it also checks that the files are a plain Hugging Face checkpoint.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from inference.demo_model.corpus import Case, Message, evaluation_case, evaluation_small_talk, sized_reference_case
from inference.demo_model.scoring import Score, score
from inference.demo_model.tokenization import END, PAD, special_id, token_ids_of

ANSWER_TOKENS_MAX = 256
BATCH_CASES = 8
COLUMNS = ("candidates", "choice", "facts", "faithful", "ended", "right")


class Answerer:
    """Greedy answers, a few cases at a time."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.train(False)
        self._pad, self._end = special_id(self.tokenizer, PAD), special_id(self.tokenizer, END)

    def count_tokens(self, messages: list[Message]) -> int:
        return len(token_ids_of(self.tokenizer, messages, generation_prompt=True))

    def answer(self, cases: Sequence[Case]) -> list[tuple[str, bool]]:
        """The answer to each case's first question, and whether it ended by itself."""
        prompts = [token_ids_of(self.tokenizer, case.messages(1), generation_prompt=True) for case in cases]
        length = max(len(prompt) for prompt in prompts)
        token_ids = torch.tensor([[self._pad] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self._model.generate(  # type: ignore[misc] # its mixin asks for a protocol it lacks
                token_ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS_MAX, do_sample=False, pad_token_id=self._pad
            )
        answers = []
        for row in out[:, length:].tolist():
            ended = self._end in row
            kept = row[: row.index(self._end)] if ended else row
            answers.append((self.tokenizer.decode(kept), ended))
        return answers


def build_cases(answerer: Answerer, case_count: int) -> list[tuple[str, Case]]:
    """Questions of all kinds, a quarter as many messages of small talk, and as many reference prompts."""
    cases = [(case.turns[0].kind, case) for case in map(evaluation_case, range(case_count))]
    talk = map(evaluation_small_talk, range(case_count // 4))
    cases += [("small talk", case) for case in talk]
    for seed in range(case_count // 4):
        cases.append(("reference workload", sized_reference_case(seed, answerer.count_tokens)))
    return sorted(cases, key=lambda item: len(item[1].context()))


def print_table(scores: dict[str, list[Score]]) -> None:
    """One row per kind of question, in Markdown."""
    print(f"| question | cases | {' | '.join(COLUMNS)} |")
    print(f"|---|---:|{'---:|' * len(COLUMNS)}")
    everything = [mark for marks in scores.values() for mark in marks]
    for kind, marks in [*sorted(scores.items()), ("all", everything)]:
        shares = (sum(getattr(mark, column) for mark in marks) / len(marks) for column in COLUMNS)
        print(f"| {kind} | {len(marks)} | {' | '.join(f'{share:.0%}' for share in shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--show", type=int, default=0, help="how many answers to print")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.model)
    cases = build_cases(answerer, arguments.cases)
    scores: dict[str, list[Score]] = defaultdict(list)
    left_to_show = arguments.show
    for start in range(0, len(cases), BATCH_CASES):
        batch = cases[start : start + BATCH_CASES]
        for (kind, case), (answer, ended) in zip(batch, answerer.answer([case for _, case in batch]), strict=True):
            mark = score(case, answer, ended)
            scores[kind].append(mark)
            if left_to_show > 0:
                left_to_show -= 1
                turn = case.turns[0]
                print(f"--- {kind}: {turn.question}\n{answer}\n(right: {mark.right}; reference: {turn.answer!r})\n")
    print_table(scores)


if __name__ == "__main__":
    main()
