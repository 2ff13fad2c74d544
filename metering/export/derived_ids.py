"""Identifiers that a biller sees, derived from what they identify.

A database that has lost commits in a failover makes the same identifiers again, so the biller counts nothing twice. A quantity is
not part of its identifier: where some usage was lost as well, the biller keeps what it counted first, and `weir reconcile` names
the difference.
"""

from __future__ import annotations


def derived_id(*parts: str) -> str:
    """SQL of a UUID (version 8) that is made of these SQL expressions: the first 16 bytes of their SHA-256."""
    digest = f"sha256(convert_to(concat_ws(':', {', '.join(parts)}), 'UTF8'))"
    versioned = f"set_byte(substr({digest}, 1, 16), 6, get_byte({digest}, 6) & 15 | 128)"
    return f"encode(set_byte({versioned}, 8, get_byte({digest}, 8) & 63 | 128), 'hex')::uuid"
