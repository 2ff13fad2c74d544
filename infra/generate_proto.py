"""Generate the Python code of the contract beside its `.proto` files.

Run as `make proto`. `make check` runs it with `--check`, which fails if the committed code is not what the `.proto` files give.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
SERVICES = ("weir/v1/admin_service.proto", "weir/v1/billing_service.proto", "weir/v1/inference_service.proto")


def include_paths() -> list[str]:
    """Directories that `import` lines are looked up in: ours, protoc's own types, and google.rpc."""
    well_known = files("grpc_tools") / "_proto"
    google_rpc = Path(next(iter(__import__("google.rpc", fromlist=["rpc"]).__path__))).parent.parent
    return [str(PROTO_ROOT), str(well_known), str(google_rpc)]


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi`, and for services `*_pb2_grpc.py`, `*_pb2_grpc.pyi`, under `out`."""
    protos = sorted(str(p.relative_to(PROTO_ROOT)) for p in PROTO_ROOT.glob("weir/v1/*.proto"))
    plugins = Path(sys.executable).parent
    base = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{p}" for p in include_paths())]
    mypy = f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}"
    mypy_grpc = f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}"
    subprocess.run([*base, mypy, f"--python_out={out}", f"--mypy_out={out}", *protos], check=True)
    subprocess.run([*base, mypy_grpc, f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *SERVICES], check=True)


def differences(fresh: Path) -> list[str]:
    """Names of generated files that are missing, stale or left over in the repository."""
    new = {p.relative_to(fresh): p.read_bytes() for p in fresh.rglob("*_pb2*")}
    committed = (p for p in PROTO_ROOT.rglob("*_pb2*") if "__pycache__" not in p.parts)
    old = {p.relative_to(PROTO_ROOT): p.read_bytes() for p in committed}
    return sorted(str(p) for p in new.keys() | old.keys() if new.get(p) != old.get(p))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(PROTO_ROOT)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        stale = differences(Path(fresh))
    if stale:
        print("generated code is stale, run `make proto`:", *stale, sep="\n  ", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
