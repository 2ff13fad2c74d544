"""What TensorRT-LLM tells of its KV cache, as changes of an index. Its events carry no cache salt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference.kv_event_index import KvCacheChange


class KvEventReader:
    """Turns the engine's event dictionaries into changes. One per engine life: event ids count from its start."""

    def __init__(self) -> None:
        self._last_id: int | None = None

    def read(self, events: Sequence[Mapping[str, Any]]) -> list[KvCacheChange]:
        """The changes that events tell of, a gap in their ids being a reset. Events of unknown types tell nothing."""
        changes = []
        for event in events:
            event_id = int(event["event_id"])
            lost = self._last_id is not None and event_id != self._last_id + 1
            self._last_id = event_id
            data = event["data"]
            stored: list[tuple[int, int, list[int]]] = []
            removed: list[int] = []
            if data["type"] == "stored":
                parent = data.get("parent_hash") or 0
                for block in data["blocks"]:
                    stored.append((parent, block["block_hash"], [token["token_id"] for token in block["tokens"]]))
                    parent = block["block_hash"]
            elif data["type"] == "removed":
                removed = list(data["block_hashes"])
            if lost or stored or removed:
                changes.append(KvCacheChange(lost, stored, removed))
        return changes
