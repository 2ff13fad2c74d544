"""Engine core: sequences, KV blocks, scheduling, execution; no processes or sockets."""
