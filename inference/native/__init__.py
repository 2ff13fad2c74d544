"""The decoder's forward pass as machine code: used where it can be, and never required.

`decoder.cpp` is the code, `build.py` compiles it for images, `loader.py` finds it or compiles it once
per machine, `decoder.py` calls it. Torch stays the reference.
"""
