"""Figures that the cluster benchmark computes from costs."""

from __future__ import annotations

from bench.cluster import capacity


def test_the_capacity_of_a_core_follows_from_its_costs() -> None:
    found = capacity(
        token_us=50, request_us=8000, postgres_request_us=400, replica_tokens_per_s=2000
    )

    assert (found["full_tokens_per_s"], found["full_requests_per_s"]) == (20_000, 125)
    assert (found["full_replicas"], found["full_postgres"]) == (10, 20)
