"""Models and engines of a process, read from settings or a fleet file, and built."""
