"""A stand-in for TensorRT-LLM 1.2.1, for machines without a GPU: its LLM API on this project's torch engine.

Names, parameters and defaults are those of the published interface (`../api.json`); a test compares them. What the release is known
to do beside its documentation is done here too: see each class. Put this directory's parent on PYTHONPATH. `TENSORRT_DOUBLE` in the
environment plants faults: see `faults.py`.
"""

from __future__ import annotations

import os

from .llm import LLM
from .parameters import SamplingParams

__version__ = os.environ.get("TENSORRT_DOUBLE_VERSION", "1.2.1")

__all__ = ["LLM", "SamplingParams"]
