"""Where packed weights are kept, and how much of the disk they may take. No torch: it crosses to the hosts in a message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """A directory for all hosts of a machine. bytes_max: of all files in it; those that a host has mapped are kept beyond it."""

    directory: str
    bytes_max: int
