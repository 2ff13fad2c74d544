"""Which models a process serves, and by which engines: read from settings or a fleet file, and built."""
