"""The commands of `weir` that run a server or look into its database; `weir_commands/server.py` lists them.

Those that call a server are `weir_cli`, in the Python SDK. `stack.py` has what the commands here share.
"""
