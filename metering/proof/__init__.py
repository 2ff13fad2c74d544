"""Proofs of the stored data: invariants computed from its rows alone."""
