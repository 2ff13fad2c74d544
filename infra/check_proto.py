"""Check the published contract with buf: lint, format, and breaking changes since the last release.

Run as `make proto-check`. The rules are in `proto/buf.yaml`. `proto/baseline/weir-v1.binpb` is the
contract of the last release. `make proto-baseline` (`--freeze`) writes it, at a release only:
refreshing it to pass this check would hide a breaking change.

buf needs every imported file in its workspace, but must not lint google.rpc. So each run builds a
temporary workspace of two modules, the contract and a copy of google.rpc from
googleapis-common-protos. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.generate_proto import GOOGLE_ROOT, PROTO_ROOT

BASELINE = PROTO_ROOT / "baseline" / "weir-v1.binpb"
BUF = Path(sys.executable).parent / "buf"


class Workspace:
    """Workspace of buf in a directory, whose methods run buf's commands."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def lint(self) -> str:
        """Run `buf lint` and return its complaints, one per line."""
        return self._buf("lint", "proto")

    def unformatted(self) -> str:
        """Run `buf format` and return the diff that it would make; empty if there is none."""
        return self._buf("format", "--diff", "--exit-code", "proto")

    def breaking(self, baseline: Path) -> str:
        """Run `buf breaking` and return the changes that break clients built from `baseline`."""
        return self._buf("breaking", "proto", "--against", str(baseline.resolve()))

    def freeze(self, baseline: Path) -> None:
        """Write the current contract, without comments, to `baseline`.

        Raises: ValueError if buf cannot read the contract.
        """
        baseline.parent.mkdir(parents=True, exist_ok=True)
        if output := self._buf(
            "build", "proto", "--exclude-source-info", "--output", str(baseline.resolve())
        ):
            raise ValueError(output)

    def _buf(self, *arguments: str) -> str:
        cache = {"BUF_CACHE_DIR": str(self._root / "cache")}
        done = subprocess.run(
            [BUF, *arguments],
            cwd=self._root,
            env=os.environ | cache,
            text=True,
            capture_output=True,
        )
        output = (done.stdout + done.stderr).strip()
        return (
            output
            if done.returncode == 0
            else output or f"buf {arguments[0]} failed with status {done.returncode}"
        )


@contextmanager
def workspace(proto_root: Path) -> Iterator[Workspace]:
    """Create a temporary workspace of the contract under `proto_root` and of google.rpc."""
    with tempfile.TemporaryDirectory(prefix="weir-buf-") as scratch:
        root = Path(scratch)
        for source, module in (
            (proto_root / "weir", "proto/weir"),
            (GOOGLE_ROOT / "google/rpc", "google/google/rpc"),
        ):
            for proto in source.rglob("*.proto"):
                copy = root / module / proto.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(proto, copy)
        modules = "modules:\n  - path: proto\n  - path: google\n"
        (root / "buf.yaml").write_text((proto_root / "buf.yaml").read_text() + modules)
        yield Workspace(root)


def complaints(proto_root: Path, baseline: Path) -> Iterator[str]:
    """Run buf on the contract under `proto_root`, and yield the complaints of each failed check."""
    with workspace(proto_root) as contract:
        if output := contract.lint():
            yield f"lint:\n{output}"
        if output := contract.unformatted():
            yield f"format (run `make fmt`):\n{output}"
        if output := contract.breaking(baseline):
            yield f"breaking change since the last release:\n{output}"


def main() -> int:
    """Check, format or freeze the contract. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--format", action="store_true", help="format the .proto files instead")
    act.add_argument(
        "--freeze", action="store_true", help="make the current contract the baseline instead"
    )
    options = parser.parse_args()
    if options.format:
        return subprocess.run([BUF, "format", "--write", str(PROTO_ROOT)]).returncode
    if options.freeze:
        with workspace(PROTO_ROOT) as contract:
            contract.freeze(BASELINE)
        return 0
    found = list(complaints(PROTO_ROOT, BASELINE))
    print(*found, sep="\n\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
