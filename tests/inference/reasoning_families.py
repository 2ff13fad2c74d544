"""Families of models by the form of their thinking: small outputs, written by hand."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from inference.text.reasoning import CHANNEL_TOKENS, MARKERS, reasoning_format
from inference.text.text_decoder import TextDecoder
from tests.inference import checkpoints

QWEN3 = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"

THINK = ("<think>", "</think>")
ANSWER = "It is 4.\n\n    four()\n"


@dataclass(frozen=True)
class Family:
    """Family of models.

    tokens: added to its vocabulary; special: flagged so. template: what its chat template writes
    about thinking. prompt: end of the prompt. output: as the model writes it.
    """

    name: str
    tokens: tuple[str, ...]
    template: str
    prompt: str
    output: str
    reasoning: str
    answer: str
    special: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def backend(self) -> Tokenizer:
        backend = Tokenizer.from_str(checkpoints._tokenizer_json())
        backend.add_tokens(
            [AddedToken(each, special=self.special, normalized=False) for each in self.tokens]
        )
        return backend

    @property
    def decoder(self) -> TextDecoder:
        backend = self.backend
        added = backend.get_added_tokens_decoder().items()
        special_ids = frozenset(id_ for id_, token in added if token.special)
        reasoning = reasoning_format(backend, (self.template,))
        assert reasoning is not None
        return TextDecoder(backend, special_ids, "tokenizer.json", reasoning)

    def id_of(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        assert token_id is not None
        return token_id

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.backend.encode(self.output, add_special_tokens=False).ids
        return ids

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = self.backend.encode(self.prompt, add_special_tokens=False).ids
        return ids


FAMILIES = [
    Family("qwen3", THINK, QWEN3, "user\n", f"<think>\nHm é,\n\n2+2.\n</think>\n\n{ANSWER}",
           "Hm é,\n\n2+2.", ANSWER),
    Family("qwen3 thinking", THINK, "<think>\n", "<think>\n", f"Hm.\n</think>\n\n{ANSWER}",
           "Hm.", ANSWER),
    Family("qwen3 switched off", THINK, QWEN3, "<think>\n\n</think>\n\n", ANSWER, "", ANSWER),
    Family("empty", THINK, QWEN3, "user\n", f"<think>\n\n</think>\n\n{ANSWER}", "", ANSWER),
    Family("none", THINK, QWEN3, "user\n", ANSWER, "", ANSWER),
    Family("blank line first", THINK, QWEN3, "user\n", f"\n\n{ANSWER}", "", f"\n\n{ANSWER}"),
    Family("unfinished", THINK, QWEN3, "user\n", "<think>\nHm, 2+2", "Hm, 2+2", ""),
    Family("closing token in the answer", THINK, QWEN3, "user\n",
           "<think>Hm.</think>Write </think> or <think>.", "Hm.", "Write </think> or <think>."),
    Family("deepseek r1", THINK, "{{ '<｜Assistant｜><think>\\n' }}", "<think>\n",
           f"Hm.\n</think>\n\n{ANSWER}", "Hm.", ANSWER),
    Family("glm 4.5", THINK, "<think></think>", "user", f"\n<think>Hm.</think>\n{ANSWER}",
           "Hm.", ANSWER),
    Family("nemotron", (), "detailed thinking on <think>", "user\n",
           f"<think>\nA <tag> & </thin.\n</think>\n\n{ANSWER}", "A <tag> & </thin.", ANSWER),
    Family("deepseek r1, opened twice", THINK, "<think>\n", "<think>\n",
           f"\n<think>\nHm.\n</think>\n\n{ANSWER}", "Hm.", ANSWER),
    Family("olmo 3, opened twice", (), "<think>", "<think>", f"\n<think>Hm <think.</think>{ANSWER}",
           "Hm <think.", ANSWER),
    Family("olmo 3", (), "<think>", "<think>", f"Hm.</think>{ANSWER}", "Hm.", ANSWER),
    Family("hunyuan", (), "<think> <answer>", "user\n",
           f"<think>\nHm.\n</think>\n<answer>\n{ANSWER}</answer>", "Hm.", ANSWER.rstrip()),
    Family("hunyuan, answer that spells the marker", (), "<think> <answer>", "user\n",
           "<think>Hm.</think><answer>End with </answer> please.\n</answer>\n", "Hm.",
           "End with </answer> please."),
    Family("hunyuan, no marker after the answer", (), "<think> <answer>", "user\n",
           "<think>Hm.</think><answer>Four </ans", "Hm.", "Four </ans"),
    Family("ernie", THINK, "<think> <response>", "<think>\n",
           f"Hm.\n</think>\n\n<response>\n{ANSWER}</response>\n", "Hm.", ANSWER.rstrip()),
    Family("cohere", MARKERS[2], "<|START_THINKING|>", "user",
           "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>", "Hm.",
           "Four.", special=True),
    Family("seed-oss", ("<seed:think>", "</seed:think>"), "<seed:think>", "assistant\n",
           f"<seed:think>Hm.</seed:think>{ANSWER}", "Hm.", ANSWER, special=True),
    Family("magistral", ("[THINK]", "[/THINK]"), "[THINK]", "user",
           f"[THINK]Hm.[/THINK]{ANSWER}", "Hm.", ANSWER, special=True),
    Family("kimi-vl", (), "◁think▷", "user", f"◁think▷Hm. ◁/thin◁/think▷{ANSWER}", "Hm. ◁/thin",
           ANSWER),
    Family("apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), "", "user",
           f"<|inner_prefix|>Hm.<|inner_suffix|>{ANSWER}", "Hm.", ANSWER, special=True),
    Family("granite", (), "Here is my thought process: … Here is my response:", "user",
           f"Here is my thought process:\nHere is a sum.\nHere is my response:\n{ANSWER}",
           "Here is a sum.", ANSWER),
    Family("granite without thinking", (), "Here is my thought process:", "user",
           "Here is my answer.", "", "Here is my answer."),
    Family("gpt-oss", CHANNEL_TOKENS, "", "<|start|>assistant",
           "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
           f"{ANSWER}<|return|>", "Hm.", ANSWER, special=True),
    Family("gpt-oss, several messages", CHANNEL_TOKENS, "", "<|start|>assistant",
           "<|channel|>analysis<|message|>Hm.<|end|>"
           "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
           "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
           "<|start|>assistant<|channel|>final<|message|>4<|return|>", "Hm.\nSo.", "I look.\n4",
           special=True),
    Family("gpt-oss, final only", CHANNEL_TOKENS, "", "<|start|>assistant",
           "<|channel|>final<|message|>4<|return|>", "", "4", special=True),
    Family("gpt-oss, cut in a header", CHANNEL_TOKENS, "", "<|start|>assistant",
           "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin", "Hm.", "",
           special=True),
    Family("gpt-oss, no header", CHANNEL_TOKENS, "", "<|start|>assistant", "Four.", "", "Four.",
           special=True),
]  # fmt: skip
