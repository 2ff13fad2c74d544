"""Optional native implementation of the decoder's forward pass.

`decoder.cpp` is the code, `build.py` compiles it for images, `loader.py` finds it or compiles it
once per machine, `decoder.py` calls it. Torch is the reference.
"""
