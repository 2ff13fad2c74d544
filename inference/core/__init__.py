"""The engine itself: sequences, KV blocks, and what each step computes. Knows no process and no socket."""
