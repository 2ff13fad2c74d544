"""The doctor's child process with short waits."""

from __future__ import annotations

import os

from inference.doctor import tensorrt_questions as questions
from inference.workers.child import serve_parent

if __name__ == "__main__":
    questions.SILENCE_S, questions.HELPERS_END_S = 0.5, 2.0
    os._exit(serve_parent("tests.inference.short_questions", questions.examine))
