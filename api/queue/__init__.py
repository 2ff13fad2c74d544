"""Who is next before an engine: bounded, fair between organizations, honest about the wait. No sockets, no database."""
