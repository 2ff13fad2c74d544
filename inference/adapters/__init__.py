"""Engine implementations: PyTorch, TensorRT-LLM in a child process, remote servers over gRPC."""
