"""Commands of `weir` that run a server or read its database; `weir_commands/server.py` lists them.

`commands.py` declares them; each imports its implementation when it runs. `stack.py` has the shared
code. Commands that call a server are in `weir_cli`, in the Python SDK.
"""
