"""The decoder's forward pass as machine code: compiled where it runs, used where it can be, and never required.

`decoder.cpp` is the code, `loader.py` compiles it once per machine, `decoder.py` calls it. Torch stays the reference.
"""
