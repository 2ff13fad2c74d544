"""Launcher of kind `kubernetes` against a strict double of the API."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference.launchers.kubernetes import KubernetesLauncher, KubernetesTerms, read_cluster
from inference.launchers.launcher import LaunchedId, LaunchFailed
from tests.kubernetes_double import TOKEN, KubernetesApi, kubernetes_api
from tests.remote_servers.certificates import make_certificates

PATHS = {
    "apps": "/apis/apps/v1/namespaces/models/statefulsets/chat",
    "": "/api/v1/namespaces/models/replicationcontrollers/chat",
}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Yield the port of a server that runs anyway."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "0.0.0.0", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def config(directory: Path, url: str, **user: str) -> Path:
    path = directory / "kubeconfig"
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user or {"token": TOKEN}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


Launch = Callable[..., KubernetesLauncher]


@asynccontextmanager
async def cluster(
    directory: Path, port: int, paths: Iterable[str] = PATHS.values()
) -> AsyncIterator[tuple[KubernetesApi, Launch]]:
    """Yield an API, and a function that makes a launcher for an object of it."""
    async with kubernetes_api(*paths) as api:

        def launch(
            group: str = "apps", name: str = "chat", host: str = "127.0.0.{number}", **terms: Any
        ) -> KubernetesLauncher:
            resource = "statefulsets" if group else "replicationcontrollers"
            values = {"start_timeout_s": 5.0, "stop_timeout_s": 5.0} | terms
            return KubernetesLauncher(
                KubernetesTerms(
                    *(group, "v1", resource, "models", name),
                    address=f"vllm://{host}:{port}",
                    kubeconfig=config(directory, api.url),
                    **values,
                )
            )

        yield api, launch


def replica(number: int = 1) -> LaunchedId:
    return LaunchedId("chat", number, "lifetime")


@pytest.mark.parametrize("group", PATHS)
async def test_the_number_of_replicas_follows_those_that_should_run(
    tmp_path: Path, port: int, group: str
) -> None:
    """The first pods are kept for later ones, since the last one is removed first."""
    async with cluster(tmp_path, port) as (api, launch):
        launcher = launch(group)
        launcher.expect(frozenset({1}))
        assert await launcher.start(replica(1)) == f"vllm://127.0.0.1:{port}"
        launcher.expect(frozenset({1, 2}))
        await launcher.start(replica(2))
        assert await launcher.runs(replica(2), "")

        launcher.expect(frozenset({2}))
        await launcher.stop(replica(1))
        launcher.expect(frozenset())
        await launcher.stop(replica(2))

        assert not await launcher.runs(replica(2), "")
        assert api.patches == [2, 3, 0]
        assert api.objects[PATHS[group]].present == 0


async def test_repeated_calls_change_nothing(tmp_path: Path, port: int) -> None:
    async with cluster(tmp_path, port) as (api, launch):
        for _ in range(3):  # successive scalers
            launcher = launch()
            launcher.expect(frozenset({1}))
            await launcher.start(replica())
        for _ in range(3):
            launcher = launch()
            launcher.expect(frozenset())
            await launcher.stop(replica())

        assert api.patches == [2, 0]


async def test_a_start_that_failed_is_scaled_down(tmp_path: Path, port: int) -> None:
    """Its row still says that it starts."""
    async with cluster(tmp_path, port) as (api, launch):
        launcher = launch(host="127.0.0.1", start_timeout_s=0.3, count=4)
        object.__setattr__(launcher._terms, "address", "vllm://127.0.0.1:1")
        launcher.expect(frozenset({0}))
        with pytest.raises(
            LaunchFailed, match=r"took no connection, or had no model, within 0.3 s"
        ):
            await launcher.start(replica(0))
        await launcher.stop(replica(0))

        assert api.patches == [4, 0]


async def test_changes_of_other_programs_are_not_overwritten(tmp_path: Path, port: int) -> None:
    async with cluster(tmp_path, port) as (api, launch):
        api.conflicts = 3
        launcher = launch()

        await launcher.start(replica())
        api.conflicts = 100
        with pytest.raises(LaunchFailed, match="changed by another program all the time"):
            await launcher.stop(replica())

        assert api.patches == [2]


async def test_a_field_is_set_where_there_is_no_scale(tmp_path: Path, port: int) -> None:
    async with cluster(tmp_path, port) as (api, launch):
        api.objects[PATHS["apps"]].has_scale = False
        with pytest.raises(LaunchFailed, match=r"status 404: .*if it has no scale subresource"):
            await launch().start(replica())

        await launch(field="spec.replicas").start(replica())

        assert api.patches == [2]


async def test_what_is_refused_names_the_remedy(tmp_path: Path, port: int) -> None:
    async with cluster(tmp_path, port) as (api, launch):
        with pytest.raises(LaunchFailed, match="status 404: check what names the object"):
            await launch(name="nobody").start(replica())
        api.verbs.remove("patch")
        with pytest.raises(LaunchFailed, match=r"PATCH .*/scale .*403: allow the service account"):
            await launch().start(replica())
        launcher = launch()
        config(tmp_path, api.url, token="old")
        with pytest.raises(LaunchFailed, match=r"401: renew the token"):
            await launcher.start(replica())
    with pytest.raises(LaunchFailed, match=r"GET http.* failed"):
        await launcher.start(replica())


def test_credentials_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchFailed, match="not a pod of Kubernetes: name a kubeconfig"):
        read_cluster(None, tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(LaunchFailed, match="credentials of Kubernetes in"):
        read_cluster(None, tmp_path)
    certificates = make_certificates(tmp_path / "certificates")
    (tmp_path / "ca.crt").write_bytes((certificates.directory / "authority.pem").read_bytes())
    (tmp_path / "token").write_text("first\n")
    assert read_cluster(None, tmp_path).token == "first"

    (tmp_path / "token").write_text("renewed\n")
    found = read_cluster(None, tmp_path)

    assert (found.url, found.token) == ("https://[fd00::1]:6443", "renewed")
    assert found.tls is not None
    assert found.tls.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "is not a kubeconfig file"),
        ("[", "credentials of Kubernetes in"),
        ("current-context: other", "is not a kubeconfig file with a current-context"),
    ],
)
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(LaunchFailed, match=reason):
        read_cluster(path)


def test_programs_that_log_in_are_refused(tmp_path: Path) -> None:
    path = config(tmp_path, "https://cluster", exec="aws")
    with pytest.raises(LaunchFailed, match="exec of a user is not supported: create a service"):
        read_cluster(path)
