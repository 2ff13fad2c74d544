"""The life of an `Embed` call: one question, one answer, metered like a stream."""
