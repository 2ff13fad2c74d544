"""Engines and what each needs to be one: ours on torch, TensorRT-LLM in a child process, servers over gRPC."""
