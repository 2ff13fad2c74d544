"""Lifecycle of backends, and of those in a worker process: start, supervision, restart, close.

Each kind of backend defines its requests and answers. Everything runs on the caller's event loop;
only `serve` runs in the background, as a task of the caller's `TaskGroup`. Holds no model and
imports no torch.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("weir.inference.workers")
