"""Engine child processes and how they are spoken to. Knows no engine: adapters register their messages."""
