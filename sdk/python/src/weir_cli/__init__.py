"""Command line `weir`: commands that call a running server and need only the client.

`commands.py` lists them, `__main__.py` is the program, `connection.py` selects the server, and
`render.py` formats output. They use gRPC through `weir_client` only, so that they work with any
server.
"""
