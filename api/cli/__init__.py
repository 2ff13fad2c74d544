"""Commands of `weir` that run a server or read its database; `weir_commands/server.py` lists them.

Commands that call a server are in `weir_cli`, in the Python SDK. `stack.py` has the shared code.
"""
