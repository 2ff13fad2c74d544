"""Environment of child processes: the variables that they need, without credentials."""

from __future__ import annotations

import os
from collections.abc import Mapping

NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *("VIRTUAL_ENV", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),  # not HF_TOKEN: models are local
    )
)
# Variables of compute libraries by prefix: compilers, loader, BLAS, OpenMP, CUDA, MPI, torch, ...
PREFIXES = (
    *("LC_", "LD_", "DYLD_", "PYTHON", "MALLOC_", "GLIBC_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "UCX_", "OMPI_", "PMIX_", "MPI_"),
    *(
        "TORCH_",
        "PYTORCH_",
        "TORCHINDUCTOR_",
        "TRITON_",
        "TOKENIZERS_",
        "TRANSFORMERS_",
        "TLLM_",
        "TRTLLM_",
        "TENSORRT_",
    ),
    "WEIR_NATIVE",  # read by `inference/native/loader.py` before any message
)


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Select the environment variables that a child inherits: an allowlist keeps secrets out."""
    return {
        name: value
        for name, value in environment.items()
        if name in NAMES or name.startswith(PREFIXES)
    }
