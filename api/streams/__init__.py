"""Between requests and the connections on which clients hear of them: frames, buffers, receivers, relays."""
