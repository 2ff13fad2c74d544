"""Rules of the code's structure: the repository complies, and each rule detects a planted fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infra import architecture
from infra.architecture import RepositoryRule, Rule, Rules, Source

IMPORT_FAULTS = [
    ("api/admin/admin_service.py", "from sqlalchemy import select", "sqlalchemy.select"),
    (
        "api/access/tls.py",
        "from weir_client.connection import is_local",
        "weir_client.connection.is_local",
    ),
    (
        "api/rpc/client_stream.py",
        "from inference.adapters.torch_engine import TorchEngine",
        "inference.adapters.torch_engine",
    ),
    (
        "api/rpc/client_stream.py",
        "from inference.core import scheduler",
        "inference.core.scheduler",
    ),
    ("api/rpc/client_stream.py", "import inference.core.kv_cache", "inference.core.kv_cache"),
    (
        "api/rpc/client_stream.py",
        "def late():\n    from inference.adapters.torch_engine import TorchEngine",
        "inference.adapters.torch_engine",
    ),
    (
        "api/rpc/client_stream.py",
        "import importlib\nimportlib.import_module('inference.adapters.torch_engine')",
        "inference.adapters.torch_engine",
    ),
    ("api/rpc/client_stream.py", "import torch", "torch"),
    ("api/serving.py", "import torch.nn", "torch.nn"),
    ("inference/core/scheduler.py", "from api.core.wire import to_domain", "api.core.wire"),
    ("inference/core/scheduler.py", "from metering.ledger import ledger", "metering.ledger.ledger"),
    ("inference/core/scheduler.py", "import grpc", "grpc"),
    ("api/fleet/fleet.py", "from smg_grpc_proto import generated", "smg_grpc_proto.generated"),
    ("inference/core/scheduler.py", "from grpc import aio", "grpc.aio"),
    ("inference/core/scheduler.py", "from sqlalchemy.orm import Mapped", "sqlalchemy.orm"),
    ("inference/core/scheduler.py", "from weir.v1 import types_pb2", "weir.v1"),
    ("inference/core/scheduler.py", "def build():\n    import tensorrt_llm", "tensorrt_llm"),
    ("metering/usage.py", "from inference.engine import Usage", "inference.engine"),
    ("api/cli/demo.py", "from chaos.rounds import Wire", "chaos.rounds"),
    ("metering/usage.py", "from api.core import settings", "api.core.settings"),
    ("metering/usage.py", "import grpc.aio", "grpc.aio"),
    ("metering/usage.py", "import torch", "torch"),
    ("metering/usage.py", "from weir.v1 import types_pb2", "weir.v1"),
    ("metering/usage.py", "from celery import shared_task", "celery"),
    ("metering/usage.py", "import kombu", "kombu"),
    ("metering/invoices.py", "import stripe", "stripe"),
    ("metering/store/db.py", "from metering.tenants import tenants", "metering.tenants.tenants"),
    ("metering/ledger/ledger.py", "from metering.proof.fsck import fsck", "metering.proof.fsck"),
    ("metering/proof/fsck.py", "from metering.quotas import quotas", "metering.quotas.quotas"),
    ("metering/holds/holds.py", "from metering.ledger import ledger", "metering.ledger.ledger"),
    (
        "metering/ledger/rating.py",
        "from metering.export.deliveries import form",
        "metering.export.deliveries",
    ),
    ("metering/receipts/merkle.py", "from metering.holds import holds", "metering.holds.holds"),
    ("api/cli/receipts.py", "import cryptography", "cryptography"),
    ("api/cli/up.py", "from celery import Celery", "celery"),
    (
        "migrations/versions/0001_accounts.py",
        "from metering.core.models import Base",
        "metering.core.models",
    ),
    ("migrations/env.py", "from api.core.settings import Settings", "api.core.settings"),
    (
        "sdk/python/src/weir_client/client.py",
        "from api.core.wire import to_domain",
        "api.core.wire",
    ),
    (
        "sdk/python/src/weir_client/client.py",
        "from metering.core.money import picos",
        "metering.core.money",
    ),
    (
        "sdk/python/src/weir_client/client.py",
        "from inference.engine import Usage",
        "inference.engine",
    ),
    ("sdk/python/src/weir_client/client.py", "from weir_cli.render import note", "weir_cli.render"),
    (
        "sdk/python/src/weir_cli/plans.py",
        "from api.cli.stack import read_settings",
        "api.cli.stack",
    ),
    ("sdk/python/src/weir_cli/plans.py", "import weir_commands.server", "weir_commands.server"),
    ("metering/tasks.py", "from weir_cli.render import note", "weir_cli.render"),
    ("infra/check_proto.py", "from weir.v1 import types_pb2", "weir.v1"),
    ("bench/load.py", "import stripe", "stripe"),
    ("api/server.py", "from aiohttp import web", "aiohttp.web"),
    ("api/openai/gateway.py", "from openai.types import Model", "openai.types.Model"),
    (
        "inference/core/scheduler.py",
        "from ...metering.ledger import ledger",
        "metering.ledger.ledger",
    ),
    (
        "inference/core/scheduler.py",
        "from inference.workers.protocol import Scheduled",
        "inference.workers.protocol",
    ),
    ("inference/workers/engine.py", "import torch", "torch"),
    (
        "inference/sampling/sampler.py",
        "from inference.core.scheduler import Scheduler",
        "inference.core.scheduler",
    ),
    (
        "api/queue/fair_queue.py",
        "from api.generation.request.live_request import Live",
        "api.generation.request.live_request",
    ),
    (
        "api/console/console.py",
        "from metering.invoicing.month_report import month_bounds",
        "metering.invoicing.month_report",
    ),
    ("api/openai/gateway.py", "from api.console.console import Console", "api.console.console"),
    (
        "api/generation/request/live_request.py",
        "from api.admin.admin_service import AdminLive",
        "api.admin.admin_service",
    ),
]
CYCLE_FAULTS = [
    {"api/a/x.py": "from api.b import y", "api/b/y.py": "from api.a import x"},
    {
        "api/a/x.py": "from api.b import y",
        "api/b/y.py": "if TYPE_CHECKING:\n    from api.a.x import X",
    },
    {"api/a/x.py": "import api.b.y", "api/b/y.py": "def late():\n    import api.a.x"},
    {
        "api/a/x.py": "from ..b import y",
        "api/b/y.py": "from api.c import z",
        "api/c.py": "from api.a.x import X",
    },
    {"api/a/x.py": "from api import c", "api/c.py": "from api.a.x import X"},
]
MODULE_CYCLE_FAULTS = [
    {"bench/x.py": "from bench import y", "bench/y.py": "from bench.x import X"},
    {"common/x.py": "import common.y", "common/y.py": "def late():\n    import common.x"},
    {"demo/x.py": "from demo import y", "demo/y.py": "if TYPE_CHECKING:\n    from demo.x import X"},
    {"api/a/x.py": "from . import y", "api/a/y.py": "from .x import X"},
    {"api/a/x.py": "import inference.b", "inference/b.py": "import api.a.x"},
    {
        "sdk/python/src/weir_client/x.py": "from weir_client.y import Y",
        "sdk/python/src/weir_client/y.py": "from . import z",
        "sdk/python/src/weir_client/z.py": "from weir_client import x",
    },
    {"infra/a/__init__.py": "from infra.a import x", "infra/a/x.py": "from infra.a import Name"},
]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    if not (architecture.ROOT / ".git").exists():
        pytest.skip("no git checkout: the files of the repository are unknown")
    return architecture.repository()


@pytest.mark.parametrize("rule", [*Rules.PYTHON, *Rules.TEXT], ids=lambda rule: rule.__name__)
def test_the_rule_holds(rule: Rule, sources: list[Source]) -> None:
    found = architecture.broken(rule, sources)

    assert not found, f"{rule.__doc__}\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("rule", Rules.REPOSITORY, ids=lambda rule: rule.__name__)
def test_the_rule_holds_for_the_repository(rule: RepositoryRule, sources: list[Source]) -> None:
    found = list(rule(sources))

    assert not found, f"{rule.__doc__}\n" + "\n".join(map(str, found))


def test_the_walk_sees_the_repository(sources: list[Source]) -> None:
    """Every rule would pass without files."""
    paths = {source.path for source in sources}

    assert {
        "inference/engine.py",
        "metering/core/models.py",
        "proto/weir/v1/types.proto",
        "Makefile",
        "pyproject.toml",
    } <= paths
    assert not any(path.endswith("_pb2.py") for path in paths)


@pytest.mark.parametrize(("path", "text", "name"), IMPORT_FAULTS)
def test_a_crossed_border_is_reported(path: str, text: str, name: str) -> None:
    [found] = architecture.borders_hold(Source(path, text))

    assert f"imports {name}" in found.what
    assert found.line == text.count("\n") + 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "api/rpc/client_stream.py",
            (
                "from inference.engine import Engine\nfrom inference.routing import router\nimport"
                " metering.ledger.ledger"
            ),
        ),
        ("api/core/wire.py", "from weir.v1 import types_pb2"),
        ("api/serving.py", "from inference.adapters.torch_engine import TorchEngine"),
        ("api/cli/up.py", "from inference.adapters.torch_engine import TorchEngine"),
        (
            "inference/core/scheduler.py",
            "import torch\nfrom inference.core.kv_cache import BlockPool\nfrom . import kv_cache",
        ),
        (
            "inference/adapters/remote_engine.py",
            "import grpc\nfrom smg_grpc_proto.generated import common_pb2",
        ),
        ("inference/adapters/tensorrt_library.py", "def build():\n    import tensorrt_llm"),
        ("metering/tasks.py", "from celery import shared_task\nimport kombu"),
        ("metering/export/stripe_gateway.py", "import stripe"),
        ("migrations/env.py", "from metering.core.models import Base"),
        ("sdk/python/src/weir_client/client.py", "from weir.v1 import types_pb2\nimport grpc"),
        ("tests/api/test_wire.py", "import torch, stripe, celery\nfrom weir.v1 import types_pb2"),
        ("api/torchlight.py", "import torchlight"),
    ],
)
def test_imports_allowed_by_the_layers_are_not_reported(path: str, text: str) -> None:
    assert list(architecture.borders_hold(Source(path, text))) == []


def test_tensorrt_imported_with_its_module_is_reported() -> None:
    early = Source(
        "inference/adapters/tensorrt_library.py",
        "try:\n    from tensorrt_llm import LLM\nexcept ImportError:\n    pass",
    )
    late = Source(
        "inference/adapters/tensorrt_library.py",
        "class Engine:\n    def __init__(self):\n        from tensorrt_llm import LLM",
    )

    assert [found.what for found in architecture.tensorrt_is_imported_late(early)]
    assert list(architecture.tensorrt_is_imported_late(late)) == []


@pytest.mark.parametrize(
    "text",
    [
        "asyncio.create_task(work())",
        "asyncio.ensure_future(work())",
        "asyncio.get_running_loop().create_task(work())",
        "loop = asyncio.get_event_loop()\nloop.create_task(work())",
        "self._loop.create_task(work())",
        "from asyncio import create_task\ncreate_task(work())",
        "from asyncio import ensure_future as later\nasyncio.ensure_future(work())",
        "start = asyncio.ensure_future",
        "async def f(group: Group):\n    group.create_task(work())",
    ],
)
def test_a_task_without_a_parent_is_reported(text: str) -> None:
    assert list(architecture.tasks_have_parents(Source("api/rpc/client_stream.py", text)))
    assert list(architecture.tasks_have_parents(Source("tests/api/test_x.py", text))) == []


@pytest.mark.parametrize(
    "text",
    [
        (
            "async def f():\n    async with asyncio.TaskGroup() as group:\n       "
            " group.create_task(work())"
        ),
        (
            "async def f():\n    async with TaskGroup() as self._group:\n       "
            " self._group.create_task(work())"
        ),
        "async def f(group: asyncio.TaskGroup):\n    group.create_task(work())",
        (
            "def __init__(self, group: asyncio.TaskGroup | None):\n    self._tasks = group\n   "
            " self._tasks.create_task(work())"
        ),
        (
            "class A:\n    group: asyncio.TaskGroup\n    def f(self):\n       "
            " self.group.create_task(work())"
        ),
        (
            "async def f():\n    group = await stack.enter_async_context(asyncio.TaskGroup())\n   "
            " group.create_task(work())"
        ),
    ],
)
def test_a_task_on_a_group_is_not_reported(text: str) -> None:
    assert list(architecture.tasks_have_parents(Source("api/rpc/client_stream.py", text))) == []


def test_every_exception_for_detached_tasks_is_needed_and_has_a_reason(
    sources: list[Source],
) -> None:
    by_path = {source.path: source for source in sources}

    for path, reason in architecture.DETACHED_TASKS.items():
        assert len(reason.split()) > 4, f"{path}: say why its tasks cannot be lost"
        assert list(architecture.detached_tasks(by_path[path])), (
            f"{path} starts no such task any more: take it off the list"
        )


@pytest.mark.parametrize(
    "text", ["self._told_at = 0.0", "self._last_used_s = 0.0", "silent_since_s: float = 0.0"]
)
def test_a_moment_that_starts_at_a_number_is_reported(text: str) -> None:
    assert list(architecture.moments_start_at_no_number(Source("api/x.py", text)))


@pytest.mark.parametrize(
    "text",
    ["self._told_at = -math.inf", "placed_at = 0", "wait_s = 0.0", "ended_at: float | None = None"],
)
def test_a_moment_without_a_number_is_not_reported(text: str) -> None:
    assert list(architecture.moments_start_at_no_number(Source("api/x.py", text))) == []


def test_a_module_without_a_docstring_is_reported() -> None:
    assert list(architecture.modules_say_what_they_are(Source("api/x.py", "import os")))
    assert list(architecture.modules_say_what_they_are(Source("api/__init__.py", "")))
    assert (
        list(architecture.modules_say_what_they_are(Source("api/x.py", '"""What it is."""'))) == []
    )


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME"])
def test_unfinished_business_is_reported(mark: str) -> None:
    [found] = architecture.nothing_is_left_undone(
        Source("api/x.py", f"x = 1\ny = 2  # {mark}: later")
    )

    assert found.line == 2


@pytest.mark.parametrize(
    "text",
    [
        "cd /" + "work/main",
        "path = '/" + "opt/wheels'",
        "ls /" + "home/me/weir",
        "pip install --find" + "-links wheels",
        "pip install --extra-index" + "-url somewhere",
        "fi" + "le:///srv/wheels",
        "https://download.py" + "torch.org/whl/cpu",
        "https://files.python" + "hosted.org/packages",
        "torch==2.13.0" + "+cpu",
    ],
)
def test_paths_of_one_machine_are_reported(text: str) -> None:
    [found] = architecture.nothing_names_one_machine(Source("CONTRIBUTING.md", f"first\n{text}\n"))

    assert found.line == 2


def test_the_installer_may_name_the_index_of_torch_for_cpus_and_no_other() -> None:
    index = "https://download.py" + "torch.org/whl/cpu"
    rule = architecture.nothing_names_one_machine

    assert list(rule(Source("infra/install.py", f'INDEX = "{index}"'))) == []
    assert list(rule(Source("infra/release.py", f'INDEX = "{index}"')))
    assert list(rule(Source("infra/install.py", f'INDEX = "{index[:-3]}cu130"')))


@pytest.mark.parametrize(
    "text", ["rm -rf build/work/x", "see ~/work/x", "https://example.test/home/page", "a/opt/b"]
)
def test_paths_that_any_machine_has_are_not_reported(text: str) -> None:
    assert list(architecture.nothing_names_one_machine(Source("README.md", text))) == []


@pytest.mark.parametrize(
    "text",
    [
        "pip " + "install '" + "weir" + "[otel]'",
        "needs `weir" + "[remote]`",
        "pip " + "install weir",
        "pip " + "install --upgrade weir-client",
        "pip " + "install weir-client" + "[receipts]",
        "pip3 " + "install torch weir==0.1.0",
        "npm " + "install @weir/client",
    ],
)
def test_an_install_from_a_package_index_is_reported(text: str) -> None:
    [found] = architecture.packages_are_installed_from_a_clone(
        Source("docs/x.md", f"first\n{text}\n")
    )

    assert found.line == 2


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e sdk/python -e '.[otel]'",
        "pip install './sdk/python[receipts]'",
        "npm install ../weir/weir-client-0.1.0.tgz",
        'from "@weir/client"',
    ],
)
def test_an_install_from_a_clone_is_not_reported(text: str) -> None:
    assert list(architecture.packages_are_installed_from_a_clone(Source("docs/x.md", text))) == []


@pytest.mark.parametrize("files", CYCLE_FAULTS)
def test_a_cycle_of_packages_is_reported(files: dict[str, str]) -> None:
    found = list(
        architecture.packages_form_no_cycle([Source(path, text) for path, text in files.items()])
    )

    assert {finding.path for finding in found} == set(files)


@pytest.mark.parametrize(
    "files",
    [
        {
            "api/a/x.py": "from api.b import y\nfrom api.a import z",
            "api/a/z.py": "from api.a import x",
            "api/b/y.py": "import api",
        },
        {"api/a/x.py": "import inference.b", "inference/b.py": "import api.a.x"},
        {"tests/a/x.py": "import tests.b.y", "tests/b/y.py": "import tests.a.x"},
        {"api/__init__.py": "import api.a.x", "api/a/x.py": "import api"},
    ],
)
def test_packages_without_a_cycle_are_not_reported(files: dict[str, str]) -> None:
    assert (
        list(
            architecture.packages_form_no_cycle(
                [Source(path, text) for path, text in files.items()]
            )
        )
        == []
    )


@pytest.mark.parametrize("files", MODULE_CYCLE_FAULTS)
def test_a_cycle_of_modules_is_reported(files: dict[str, str]) -> None:
    found = list(
        architecture.modules_form_no_cycle([Source(path, text) for path, text in files.items()])
    )

    assert {finding.path for finding in found} == set(files)


@pytest.mark.parametrize(
    "files",
    [
        {"bench/x.py": "from bench import y", "bench/y.py": "import common.z, bench"},
        {"infra/a/__init__.py": "from infra.a.x import X", "infra/a/x.py": "from infra.a import y"},
        {"infra/a/__init__.py": "from infra.a import x", "infra/a/x.py": "from . import x, y"},
        {"tests/a/x.py": "import tests.a.y", "tests/a/y.py": "import tests.a.x"},
    ],
)
def test_modules_without_a_cycle_are_not_reported(files: dict[str, str]) -> None:
    sources = [
        *(Source(path, text) for path, text in files.items()),
        Source("infra/a/y.py", "X = 1"),
    ]

    assert list(architecture.modules_form_no_cycle(sources)) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(): ...\nA = 1\nB: int = 2\n_C = 3",
        "class A: ...\nA_S, B_S = 1, 2\nC = f'{A}'\nD = 'a\\nb'",
        "async def f(): ...\nA = 'SELECTED'\nB = 'update'\nC = ['a WHERE b']",
    ],
)
def test_constants_after_the_first_definition_are_reported(text: str) -> None:
    for path in ("api/x.py", "tests/x.py", "bench/x.py"):
        [found] = architecture.constants_are_at_the_head(Source(path, text))

        assert found.line == 2


@pytest.mark.parametrize(
    "text",
    [
        "A = 1\nB = 2\nC = 3\ndef f():\n    D = 1\n    E = 2\n    F = 3",
        "class A:\n    A = 1\n    B = 2\n    C = 3\nA = 1\nB = 2\nc = d = e = 3",
        "def f(): ...\nA = 1\nB = text('SELECT 1')\nC = 'x\\n  FROM a'\nD = f'INSERT INTO {A}'",
        "def f(): ...\nA: int\nB: int\nC: int",
    ],
)
def test_constants_at_the_head_and_sql_are_not_reported(text: str) -> None:
    assert list(architecture.constants_are_at_the_head(Source("api/x.py", text))) == []


@pytest.mark.parametrize(("method_count", "found_count"), [(30, 0), (31, 1)])
def test_a_class_of_several_concepts_is_reported(method_count: int, found_count: int) -> None:
    text = "class A:\n" + "    def f(self): ...\n" * method_count

    found = list(architecture.classes_are_one_concept(Source("api/x.py", text)))

    assert len(found) == found_count


@pytest.mark.parametrize(
    ("border", "lost"),
    [
        (architecture.Border(("api.lost",), inside=("api/",), why="x"), "api.lost"),
        (architecture.Border(("grpc",), inside=("api/lost/",), why="x"), "api/lost/"),
        (
            architecture.Border(("grpc",), inside=("api/",), save_for=("api/lost.py",), why="x"),
            "api/lost.py",
        ),
        (architecture.Border(("api",), inside=("api/",), but=("api.lost",), why="x"), "api.lost"),
    ],
)
def test_a_border_around_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, border: architecture.Border, lost: str
) -> None:
    monkeypatch.setattr(
        architecture,
        "BORDERS",
        (border, architecture.Border(("api.a", "grpc"), inside=("api/",), why="x")),
    )

    [found] = architecture.borders_guard_something([Source("api/a.py", "")])

    assert f"a border names {lost}," in found.what


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("`api/a/` and `api/a/x.py`, `infra/adr/` and `other/x.py`", None),
        ("`api/a/x.py`", "does not name the package api/a/"),
        ("`api/a/`\n`api/a/y.py`", "names api/a/y.py, which does not exist"),
        ("`api/a/`\n`api/b/`", "names api/b/, which does not exist"),
        ("`api/a/`, `api/b.py::f`, `api/b.py::C.m`, `api/b.py::N`", None),
        ("`api/a/`, `api/b.py::g`", "names g, which api/b.py does not define"),
        ("`api/a/`, `api/b.py::m`", "names m, which api/b.py does not define"),
        ("`api/a/`, `infra/adr/0001.md::title`", None),
        (
            "`api/a/`, `infra/adr/0001.md::titles`",
            "names titles, which infra/adr/0001.md does not define",
        ),
    ],
)
def test_a_wrong_page_on_the_architecture_is_reported(page: str, found: str | None) -> None:
    files = [
        Source("api/a/x.py", ""),
        Source("api/b.py", "def f(): ...\nclass C:\n    def m(self): ...\nM, N = 1, 2\n"),
        Source("infra/adr/0001.md", "title"),
        Source("docs/architecture.md", page),
    ]

    assert [finding.what for finding in architecture.page_names_what_exists(files)] == (
        [found] if found else []
    )


def test_a_wrong_module_in_the_readme_of_a_package_is_reported() -> None:
    files = [
        Source("api/core/errors.py", ""),
        Source("api/README.md", "`errors.py`, `core/errors.py`\n`core.py`"),
        Source("docs/architecture.md", "`api/core/`"),
    ]

    [found] = architecture.page_names_what_exists(files)

    assert str(found) == "api/README.md:2: names core.py, which does not exist"


@pytest.mark.parametrize("path", ["docs/internals/decisions.md", "metering/README.md"])
def test_a_wrong_path_on_a_page_about_the_code_is_reported(path: str) -> None:
    [found] = architecture.page_names_what_exists([Source(path, "a\n`api/a.py`")])

    assert str(found) == f"{path}:2: names api/a.py, which does not exist"


@pytest.mark.parametrize(
    ("text", "is_reported"),
    [
        ("def f({}): ...", False),
        ("def f({}, k): ...", True),
        ("async def f({}, *, k): ...", True),
        ("class C:\n    def f(self, {}): ...", False),
        ("class C:\n    def f(self, {}, **k): ...", True),
        ("@triton.jit\ndef f({}, k): ...", False),
    ],
)
def test_a_long_signature_is_reported(text: str, is_reported: bool) -> None:
    names = ", ".join(f"p{number}" for number in range(architecture.PARAMETERS_MAX))
    source = Source("sdk/python/src/weir_cli/x.py", text.format(names))

    found = [each.what for each in architecture.signatures_are_short(source)]

    assert [each.split(":")[0] for each in found] == (
        ["f has 11 parameters, at most 10 are allowed"] if is_reported else []
    )


def test_a_part_that_has_grown_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        Source("api/a.py", "x\n" * 3),
        Source("metering/b.py", "x\n"),
        Source("tests/c.py", "x\n" * 2),
        Source("tests/d.ts", "x\n"),
        Source("api/d.md", "x\n"),
        Source("migrations/e.py", "x\n"),
    ]
    sizes = {"product": (("api/", "metering/"), 4), "tests": (("tests/",), 3)}
    monkeypatch.setattr(architecture, "LINES_MAX", sizes)
    monkeypatch.setattr(architecture, "MODULES_MAX", 2)
    assert list(architecture.code_does_not_grow(files)) == []

    for part, (paths, limit) in sizes.items():
        lowered = sizes | {part: (paths, limit - 1)}
        monkeypatch.setattr(architecture, "LINES_MAX", lowered)
        [found] = architecture.code_does_not_grow(files)
        assert found.what == f"{part}: {limit} lines, at most {limit - 1} are allowed"
    monkeypatch.setattr(architecture, "LINES_MAX", sizes)
    monkeypatch.setattr(architecture, "MODULES_MAX", 1)
    [found] = architecture.code_does_not_grow(files)
    assert "2 modules" in found.what


def test_code_outside_all_parts_is_reported() -> None:
    """Otherwise lines could move to a folder that nothing measures."""
    files = [Source("other/a.py", ""), Source("api/b.py", ""), Source("other/c.md", "")]

    [found] = architecture.code_does_not_grow(files)

    assert found.path == "other/a.py"


# Engine workers are separate processes so that torch never runs beside the API's event loop;
# importing it there would cost each API process seconds at start and hundreds of megabytes.
WITHOUT_TORCH = (
    *("inference.errors", "inference.engine", "inference.text.tokenizer"),
    *("inference.routing.router", "inference.adapters.remote_engine"),
    *("api.fleet.fleet", "api.server"),
)


def test_the_api_process_never_imports_torch() -> None:
    assert first_with_torch(*WITHOUT_TORCH) == ""


def test_the_torch_check_sees_torch() -> None:
    assert first_with_torch("inference.errors", "inference.decoder.model") == (
        "inference.decoder.model"
    )


def first_with_torch(*modules: str) -> str:
    """Import modules in a new interpreter; return the first one that imports torch, or ""."""
    code = """
import sys, importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(
        command, cwd=architecture.ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
