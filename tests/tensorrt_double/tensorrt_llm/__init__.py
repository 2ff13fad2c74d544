"""Double of TensorRT-LLM 1.2.1, for machines without a GPU: its LLM API on this project's torch
engine.

Names, parameters and defaults are those of the published interface (`../api.json`), as a test
checks. Undocumented behaviour of the release is reproduced too: see each class. Put this
directory's parent on PYTHONPATH. The environment variable `TENSORRT_DOUBLE` injects faults: see
`faults.py`.
"""

from __future__ import annotations

import os

from .llm import LLM
from .parameters import SamplingParams

__version__ = os.environ.get("TENSORRT_DOUBLE_VERSION", "1.2.1")

__all__ = ["LLM", "SamplingParams"]
