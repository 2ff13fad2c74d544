"""Output to clients: buffers, the stream writer, replay, and the encoder of each wire."""
