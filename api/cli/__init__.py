"""The command line `weir`: clients of the public API, and the commands that start it on a machine.

`main.py` is the entry; `connection.py` decides where to connect; `render.py` draws; each other module is a group of commands.
The client commands speak gRPC through `weir_client` and nothing else, so that they work against any server.
"""
