"""Engine worker processes and their protocol; adapters add the messages of their engines."""
