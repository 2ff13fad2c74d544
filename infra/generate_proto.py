"""Generate the Python code of the contract, and of vendored protocols, beside the `.proto` files.

Run as `make proto`. `make proto-check` runs it with `--check`, which fails if the committed code is
out of date.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import status_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
VENDORED = ("api/keda/externalscaler.proto",)  # protocols of other projects, from the root
# Googleapis-common-protos has `google/rpc/*.proto` beside its code.
GOOGLE_ROOT = Path(status_pb2.__file__).parents[2]


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and, for services, `*_pb2_grpc.py` and `.pyi` under `out`."""
    protos = sorted(PROTO_ROOT.glob("weir/v1/*.proto"))
    services = [proto for proto in protos if "\nservice " in proto.read_text()]
    messages_to = [f"--python_out={out}", f"--mypy_out=quiet:{out}"]
    stubs_to = [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]
    protoc([*messages_to, *map(str, protos)])
    protoc([*stubs_to, *map(str, services)])
    protoc([f"-I{ROOT}", *messages_to, *stubs_to, *VENDORED])


def protoc(arguments: list[str]) -> None:
    """Run the pinned protoc of grpcio-tools, with mypy-protobuf's plugins of this environment."""
    well_known = files("grpc_tools") / "_proto"
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    roots = [f"-I{root}" for root in (PROTO_ROOT, well_known, GOOGLE_ROOT)]
    command = [sys.executable, "-m", "grpc_tools.protoc", *plugins, *roots, *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def contract() -> FileDescriptorSet:
    """Compile the contract, with its comments."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "contract"
        protos = map(str, sorted(PROTO_ROOT.glob("weir/v1/*.proto")))
        protoc(["--include_source_info", f"--descriptor_set_out={out}", *protos])
        return FileDescriptorSet.FromString(out.read_bytes())


def home_of(path: Path) -> Path:
    """Return the folder below which a generated file belongs."""
    is_vendored = any(path.parent == Path(each).parent for each in VENDORED)
    return ROOT if is_vendored else PROTO_ROOT


def generated(root: Path) -> dict[Path, bytes]:
    """Generate the files and return their contents by path relative to `root`."""
    return {
        path.relative_to(root): path.read_bytes()
        for path in root.rglob("*_pb2*.py*")
        if path.suffix != ".pyc"
    }


def main() -> int:
    """Generate the files, or compare them with the committed ones. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        new, old = generated(Path(scratch)), generated(PROTO_ROOT)
        for each in VENDORED:
            folder = Path(each).parent
            old |= {folder / name: text for name, text in generated(ROOT / folder).items()}
    stale = sorted(path for path in new.keys() | old.keys() if new.get(path) != old.get(path))
    if check and stale:
        print("generated code is out of date, run `make proto`:", file=sys.stderr)
    for path in stale:
        target = home_of(path) / path
        print(f"  {target.relative_to(ROOT)}")
        if not check and path in new:
            target.write_bytes(new[path])
        elif not check:
            target.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
