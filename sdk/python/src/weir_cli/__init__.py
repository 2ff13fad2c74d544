"""The command line `weir`: the commands that call a running server, for laptops that have no more than the client.

`commands.py` lists them, `__main__.py` is the program, `connection.py` decides where to connect, and `render.py` draws. They speak
gRPC through `weir_client` and nothing else, so that they work against any server.
"""
