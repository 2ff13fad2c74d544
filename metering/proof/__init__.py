"""Proofs over what stands in the database: what must be true of it, worked out from its rows and from nothing else."""
