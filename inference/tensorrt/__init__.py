"""TensorRT-LLM as an engine: the LLM API of release 1.2.1 in a child process, behind the protocol that all engines share."""
