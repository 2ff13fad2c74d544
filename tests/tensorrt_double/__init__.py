"""Double of TensorRT-LLM, and the published interface that tests compare it with."""
