"""Engines of other machines: `trtllm-serve --grpc` and `vllm serve --grpc`, spoken to by the stubs of `smg-grpc-proto`."""
