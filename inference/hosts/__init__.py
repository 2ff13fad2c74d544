"""Models in child processes: started, spoken to, watched, started again. Only `host.py` leads to torch."""
