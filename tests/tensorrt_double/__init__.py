"""The stand-in for TensorRT-LLM, and the published interface that it is compared with."""
