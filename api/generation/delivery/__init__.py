"""Delivery of output to clients: buffers, stream writer, replay, encoders of each protocol."""
