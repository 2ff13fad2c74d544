"""The Helm chart: rendered by Helm's engine for each example, valid, and started as processes.

What a cluster alone could show is listed in `docs/how-to/kubernetes.md`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from weir_client import AdminClient, Client

from infra.architecture import ROOT
from tests.conftest import APPLICATION_ROLE, as_application, new_database
from tests.inference.real_servers import free_port, needs, python_of
from tests.kubernetes_double import endpoint, endpoint_slice
from tests.service import PATIENCE_S, wait_for

pytestmark = needs("helm")

CHART = ROOT / "infra" / "helm" / "weir"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
CUSTOM_KINDS = {
    "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}
# No package has their schemas.
UNPROVED_KINDS = ("GRPCRoute", "BackendTLSPolicy")
# Prints, for each set of values on standard input: manifests, or the error of Helm.
RENDER = """
import json, sys
import kubernetes_validate, yaml
from helm_python import Chart, HelmError, disable_logging

disable_logging()
custom, answers = set(sys.argv[2:]), []
with Chart.load(sys.argv[1]) as chart:
    for values in json.load(sys.stdin):
        try:
            chart.validate_schema(values)
            rendered = chart.render(values=values, name="weir", namespace="ai")
        except HelmError as error:
            answers.append({"error": str(error)})
            continue
        manifests = [
            each
            for path, text in sorted(rendered.items())
            if path.endswith(".yaml")
            for each in yaml.safe_load_all(text)
            if each
        ]
        faults = []
        for each in manifests:
            if each["kind"] not in custom:
                try:
                    kubernetes_validate.validate(each, "1.37", strict=True)
                except kubernetes_validate.ValidationError as error:
                    faults.append(f"{each['kind']}: {list(error.path)}: {error.message}")
        answers.append({"manifests": manifests, "faults": faults})
json.dump(answers, sys.stdout)
"""

Manifest = dict[str, Any]


def rendered(*values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Render the chart with each of the values, and validate what Kubernetes knows."""
    done = subprocess.run(
        [python_of("helm"), "-c", RENDER, str(CHART), *CUSTOM_KINDS, *UNPROVED_KINDS],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("[") :])
    return answers


def values_of(example: str) -> dict[str, Any]:
    """Return the values of an example."""
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text())
    return values


@pytest.fixture(scope="module")
def examples() -> dict[str, list[Manifest]]:
    """Return the manifests of each example, which are valid."""
    answers = dict(zip(EXAMPLES, rendered(*map(values_of, EXAMPLES)), strict=True))
    assert [(name, each.get("error")) for name, each in answers.items() if "error" in each] == []
    assert [(name, each["faults"]) for name, each in answers.items() if each["faults"]] == []
    return {name: each["manifests"] for name, each in answers.items()}


def found(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the manifest of a kind and name."""
    [manifest] = [
        each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return manifest


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the specifications of all pods, by name of their owner."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests
        if "template" in each.get("spec", {})
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_rendered_and_valid(
    examples: dict[str, list[Manifest]], example: str
) -> None:
    assert {"weir-api", "weir-worker", "weir-migrate"} <= pods(examples[example]).keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_container_can_gain_rights(examples: dict[str, list[Manifest]], example: str) -> None:
    for pod in pods(examples[example]).values():
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_may_drain_before_it_is_killed(
    examples: dict[str, list[Manifest]], example: str
) -> None:
    pod = pods(examples[example])["weir-api"]
    [container] = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    drain_s = float(variables["WEIR_DRAIN_S"]) + float(variables["WEIR_DRAIN_NOTICE_S"])

    stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain_s

    assert pod["terminationGracePeriodSeconds"] >= stop_s + 20


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_secret_exists_before(examples: dict[str, list[Manifest]], example: str) -> None:
    assert "Secret" not in {each["kind"] for each in examples[example]}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_setting_of_an_example_is_one(
    examples: dict[str, list[Manifest]], example: str
) -> None:
    known = set(
        re.findall(r"^### `(\w+)`", (ROOT / "docs/reference/settings.md").read_text(), re.M)
    )
    named = {
        variable["name"]
        for pod in pods(examples[example]).values()
        for variable in pod["containers"][0]["env"]
    }

    assert named - known - {"HOME", "POD_IP"} == set()


def test_custom_resources_are_valid(examples: dict[str, list[Manifest]]) -> None:
    folder = os.environ.get("WEIR_TEST_KUBERNETES_MODELS")
    if not folder:
        pytest.skip("WEIR_TEST_KUBERNETES_MODELS is not set: `make test-peers` sets it")
    manifests = [
        [CUSTOM_KINDS[each["kind"]], each["kind"], each]
        for manifests in examples.values()
        for each in manifests
        if each["kind"] in CUSTOM_KINDS
    ]
    planted = [CUSTOM_KINDS["ScaledObject"], "ScaledObject", {"spec": {"triggers": "none"}}]
    script = f"""
        for (const [path, kind, manifest] of {json.dumps([*manifests, planted])}) {{
          try {{ new (await import(path))[kind](manifest).validate(); console.log("valid"); }}
          catch (error) {{ console.log(kind, String(error.message).replaceAll("\\n", " ")); }}
        }}
    """

    done = subprocess.run(
        ["node", "--input-type=module", "--eval", script],
        cwd=Path(folder).parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )

    assert done.returncode == 0, done.stderr
    *lines, fault = done.stdout.splitlines()
    assert lines == ["valid"] * len(manifests)
    assert fault.startswith("ScaledObject ")
    assert {kind for _, kind, _ in manifests} == set(CUSTOM_KINDS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"worker": {"replicas": 2}}, "needs a broker"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs"),
        ({"api": {"replica": 3}}, "replica"),
        ({"api": {"settings": {"WEIR_CONNECTIONS_MAX": 1000000}}}, "string"),
        ({"api": {"drain": {"seconds": 0}}}, "minimum"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "runAsNonRoot"),
        ({"api": {"endpointSlices": {"namespaces": ["Models"]}}}, "pattern"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], words: str) -> None:
    [answer] = rendered(values)

    assert words in answer["error"]


def test_keda_calls_the_scaler_where_it_listens(examples: dict[str, list[Manifest]]) -> None:
    manifests = examples["dynamo"]
    [container] = pods(manifests)["weir-api"]["containers"]
    listen = {each["name"]: each.get("value", "") for each in container["env"]}["WEIR_KEDA_LISTEN"]
    [scaled] = [each for each in manifests if each["kind"] == "ScaledObject"]
    [trigger] = scaled["spec"]["triggers"]
    [service] = [
        each
        for each in manifests
        if each["kind"] == "Service" and each["metadata"]["name"] == "weir-api"
    ]
    [policy] = [
        each
        for each in manifests
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "weir-api"
    ]

    host, port = trigger["metadata"]["scalerAddress"].split(":")
    assert host.startswith("weir-api.")
    assert trigger["metadata"]["enableTLS"] == "true"
    [target] = [each for each in service["spec"]["ports"] if each["port"] == int(port)]
    [inside] = [each for each in container["ports"] if each["name"] == target["targetPort"]]
    assert listen == f"0.0.0.0:{inside['containerPort']}"
    assert [{"port": inside["name"]}] in [each["ports"] for each in policy["spec"]["ingress"]]


def test_the_api_may_follow_the_slices_of_named_namespaces_only() -> None:
    """It lists and watches. Without namespaces it has no account, as its other pods."""
    [answer] = rendered({"api": {"endpointSlices": {"namespaces": ["models", "more"]}}})
    assert answer.get("faults") == [], answer
    manifests = answer["manifests"]

    roles = [each for each in manifests if each["kind"] == "Role"]
    bindings = [each for each in manifests if each["kind"] == "RoleBinding"]
    found_pods = pods(manifests)

    assert [each["metadata"]["namespace"] for each in roles] == ["models", "more"]
    [rule] = roles[0]["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["discovery.k8s.io"], ["endpointslices"])
    assert rule["verbs"] == ["list", "watch"]
    account = found(manifests, "ServiceAccount", "weir-api")
    assert not account["automountServiceAccountToken"]
    for role, binding in zip(roles, bindings, strict=True):
        assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        [subject] = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("weir-api", "ai")
    mounts = {name: pod["automountServiceAccountToken"] for name, pod in found_pods.items()}
    assert [name for name, is_mounted in mounts.items() if is_mounted] == ["weir-api"]
    assert found_pods["weir-api"]["serviceAccountName"] == "weir-api"


def test_the_slices_of_the_double_are_valid() -> None:
    """By the schema that Kubernetes publishes; a planted fault is found."""
    both = endpoint("fd00::1", uid="p", ready=True, serving=True, terminating=False)
    slices = [
        endpoint_slice("a", endpoint("10.0.0.1", ready=None), endpoint("10.0.0.2", uid="p")),
        endpoint_slice("b", both, family="IPv6", port=None),
    ]
    script = """
import json, sys
import kubernetes_validate
for each in json.load(sys.stdin):
    try:
        kubernetes_validate.validate(each, "1.37", strict=True)
        print("valid")
    except kubernetes_validate.ValidationError as error:
        print(error.message)
"""

    done = subprocess.run(
        [python_of("helm"), "-c", script],
        input=json.dumps([*slices, slices[0] | {"addressType": 4}]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )

    assert done.returncode == 0, done.stderr
    *lines, fault = done.stdout.splitlines()
    assert lines == ["valid", "valid"]
    assert "string" in fault


def test_the_rules_and_the_dashboard_are_those_of_the_repository(
    examples: dict[str, list[Manifest]],
) -> None:
    manifests = examples["dynamo"]

    rules = found(manifests, "PrometheusRule", "weir")
    dashboard = found(manifests, "ConfigMap", "weir-dashboard")

    assert rules["spec"] == yaml.safe_load((ROOT / "infra/alerts.yaml").read_text())
    given = (ROOT / "infra/dashboards/weir.json").read_text()
    assert json.loads(dashboard["data"]["weir.json"]) == json.loads(given)


class Cluster:
    """Starts the containers of manifests as processes: paths, secrets and ports are of this test.

    `secrets` are values by the name of their Secret.
    """

    def __init__(self, directory: Path, secrets: Mapping[str, str]) -> None:
        self._directory = directory
        self._secrets = secrets
        self.ports = {port: free_port() for port in (8443, 9443, 8444, 10443)}

    def start(self, pod: Manifest, arguments: list[str] | None = None) -> subprocess.Popen[str]:
        """Start the only container of a pod, with other arguments as `kubectl exec` does."""
        [container] = pod["containers"]
        environment = {each["name"]: self._value(each) for each in container["env"]}
        command = [*container["command"], *(arguments or container["args"])]
        assert command[0] == "weir"
        program = str(Path(sys.executable).with_name("weir"))
        with (self._directory / "log").open("a") as log:
            return subprocess.Popen(
                [program, *map(self._here, command[1:])],
                env={"PATH": os.environ["PATH"], **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._directory,
            )

    def run(self, pod: Manifest, arguments: list[str] | None = None) -> str:
        """Run a container to its end; return its output."""
        process = self.start(pod, arguments)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, self.log
        return output

    @property
    def log(self) -> str:
        """Log of all containers."""
        return (self._directory / "log").read_text()

    def path(self, path: str) -> Path:
        """Return where a path of a container is."""
        return self._directory / path.lstrip("/")

    def _value(self, variable: Manifest) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return self._here(variable["value"])
        if "fieldRef" in source:
            return "127.0.0.1"
        return self._secrets[source["secretKeyRef"]["name"]]

    def _here(self, text: str) -> str:
        text = text.replace("$(POD_IP)", "127.0.0.1")
        for port, free in self.ports.items():
            text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{free}")
        return re.sub(r"^/(var/lib/weir|tmp)", f"{self._directory}/\\1", text)


@pytest.fixture
def empty_database(postgres_server: str) -> Iterator[str]:
    """Yield the URL of an empty database."""
    with new_database(postgres_server) as url:
        yield url


def test_the_rendered_commands_serve_requests(empty_database: str, tmp_path: Path) -> None:
    """Migration, api and worker of the example `one-node`, in the application role."""
    role = {"applicationRole": APPLICATION_ROLE, "passwordSecret": {"name": "weir-password"}}
    [answer] = rendered(values_of("one-node") | {"database": {"migration": role}})
    specifications = pods(answer["manifests"])
    api = specifications["weir-api"]
    secrets = {
        "weir-database-owner": empty_database,
        "weir-database": as_application(empty_database),
        "weir-password": APPLICATION_ROLE,
    }
    for path in ("var/lib/weir", "tmp"):
        (tmp_path / path).mkdir(parents=True)
    cluster = Cluster(tmp_path, secrets)
    with ExitStack() as stack:
        cluster.run(specifications["weir-migrate"])
        process = cluster.start(api)
        stack.callback(end, process)
        worker = cluster.start(specifications["weir-worker"])
        stack.callback(end, worker)
        probe = api["containers"][0]["readinessProbe"]["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in api["containers"][0]["ports"]}
        url = f"http://127.0.0.1:{cluster.ports[ports[probe['port']]]}{probe['path']}"
        wait_for(lambda: answers(url), "the probe to succeed", 60)

        secret = cluster.run(api, ["init"]).split()[-1]
        address = f"127.0.0.1:{cluster.ports[ports['grpc']]}"
        with AdminClient(address, secret) as admin, ExitStack() as clients:
            created = admin.create_api_key("main", "default", "chart")
            client = clients.enter_context(Client(address, created.secret))
            [model, *_] = client.list_models()
            result = client.complete(model.name, prompt="Hello", max_output_tokens=8)
        wait_for(cluster.path("/tmp/ready").exists, "the worker to accept tasks")
        process.send_signal(signal.SIGTERM)
        worker.send_signal(signal.SIGTERM)

        assert result.usage.delivered_token_count > 0
        assert process.wait(api["terminationGracePeriodSeconds"]) == 0
        assert worker.wait(PATIENCE_S) == 0


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process of a failed test, and close its output."""
    process.kill()
    process.communicate()


def answers(url: str) -> bool:
    """Return whether a probe succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
