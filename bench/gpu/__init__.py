"""The embedded engine on one GPU: `check` compares its results, `measure` its speed.

They import `inference` and `common` alone, so they run without PostgreSQL, gRPC, or an installation
of Weir, and on torch 2.11 as well as on the pinned version. A copy of the folders `bench`, `common`
and `inference` is enough on a machine with torch, Triton, numpy, msgspec, safetensors, tokenizers
and Jinja2; `measure` also uses `transformers` if it is installed. `check` computes its
reference on the CPU, with the native library if there is a compiler; `WEIR_NATIVE=0` uses torch.
"""
