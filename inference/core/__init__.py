"""Engine core: sequences, KV blocks, scheduling and model execution, without processes or sockets."""
