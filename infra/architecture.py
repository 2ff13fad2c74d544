"""Rules of the code's structure: allowed imports, parents of tasks, contents of files.

Reads source and never runs it. `tests/test_architecture.py` applies every rule to the repository
and to a planted fault. Rules about the product exempt the tests, which may import every layer.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = (
    "api/",
    "chaos/",
    "common/",
    "demo/",
    "inference/",
    "metering/",
    "migrations/",
    "weir_commands/",
    "sdk/",
    "infra/",
    "bench/",
)
# Also the page of the console, which its own check compares with its source.
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|^api/console/static/")

BILLING_PACKAGES = ("pricing", "ledger", "plans", "invoicing", "reports")
# Packages beside `core` and `store`.
METERING_PACKAGES = (
    *("tenants", "quotas", "holds", "configuration", "control", "receipts"),
    *BILLING_PACKAGES,
    *("alerts", "export", "proof"),
)
# The API tokenizes prompts and parses tool calls in outputs.
TEXT_FOR_API = tuple(f"inference.text.{name}" for name in ("tokenizer", "tools", "call_parser"))
# Files that may start a task without a TaskGroup, each with the reason.
DETACHED_TASKS: dict[str, str] = {
    "api/access/oidc.py": (
        "callers share a read of a document, which outlives each of them and ends within seconds;"
        " the client keeps the task and takes its exception"
    ),
    "common/incidents.py": "defines a TaskGroup; its tasks are that group's",
    "sdk/python/src/weir_client/stream.py": (
        "a client that opens on first use has no block that could own its tasks: `SharedStream`"
        " keeps, cancels and awaits them"
    ),
}
MOMENT = re.compile(r"_(at|at_s|since|since_s|used_s|until|until_s|due_s)$")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:work|opt|root|home|Users)/[\w.-]+|fi" + r"le://")
PACKAGE_SOURCE = re.compile(
    r"https?://[\w.-]*(?:pypi|pythonhosted|pytorch)[\w./-]*|--(?:extra-)?index-url|--find-[l]inks|==[\w.]+\+cpu"
)
# PyPI's `weir` is another project, and neither client is published: these commands would fail or
# install an unrelated package.
UNPUBLISHED_PACKAGE = re.compile(
    r"\bweir(?:-client)?\[[a-z]"
    r"|\bpip3? install [^\n]*?(?<![\w./@-])weir(?:-client)?(?![\w./-])"
    r"|\bnpm (?:install|i|add) [^\n]*?@weir/client"
)
RELEASE_NOTES = "CHANGELOG.md"  # describes past versions
# The one file that may name a package index, PyTorch's: no registry has its builds without CUDA.
INSTALLER = "infra/install.py"
TORCH_CPU_INDEX = "https://download.py" + "torch.org/whl/cpu"
PACKAGED = ("api/", "inference/", "metering/")  # folders whose packages form no cycle
SDK = "sdk/python/src/"  # its modules are imported without this prefix
# Folders whose modules form no cycle.
ACYCLIC = (*PACKAGED, "chaos/", "common/", "weir_commands/", SDK, "infra/", "bench/", "demo/")
# Python modules below the folders of `PACKAGED`. To be lowered and never raised.
MODULES_MAX = 412
CODE = re.compile(r"\.(py|ts|mjs|css|html|h|cpp|sql)$|(^|/)Dockerfile$|\.Dockerfile$|^\.ci/")
# Lines of code written by hand: parts with their folders, each with its ceiling. To be lowered and
# never raised, so that lines saved in one part cannot be added to another. A file belongs to the
# first part that has its path. Generated code does not count.
LINES_MAX: dict[str, tuple[tuple[str, ...], int]] = {
    "product": (("api/", "common/", "inference/", "metering/", "weir_commands/"), 120_996),
    "fault injection": (("chaos/",), 1_059),
    "command line": (("sdk/python/src/weir_cli/",), 10_125),
    "Python client": (("sdk/python/",), 7_741),
    "TypeScript client": (("sdk/typescript/",), 6_882),
    "console page": (("console/",), 3_966),
    "benchmarks": (("bench/",), 12_020),
    "demo": (("demo/",), 4_524),
    "tools": (("infra/", "docs/", ".ci/", "conftest.py"), 8_519),
    "tests": (("tests/",), 145_767),
}
# Code that can only grow: neither a released revision nor a released field is ever removed.
UNLIMITED = ("migrations/", "proto/")
PARAMETERS_MAX = 10  # of a function: what belongs together is a record
METHODS_MAX = 30  # of a class in api/ and inference/: more are two concepts
LATE_CONSTANTS_MAX = 2  # after the first definition: more are a second module below the first
SQL_VERB = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|LOCK|NOTIFY)\b")
SQL_WORD = re.compile(
    r"\b(SELECT|INTO|UPDATE|DELETE|VALUES|FROM|WHERE|JOIN|RETURNING)\b|\bsum\(|\bpg_\w+\("
)
PAGE = "docs/architecture.md"
PAGES = re.compile(
    r"docs/(?:architecture|internals/[\w-]+)\.md|(?:api|inference|metering)/README\.md"
)
# A path, or a path and a name that it defines: `api/server.py`, `api/server.py::build_server`.
NAMED_PATH = re.compile(
    r"`((?:api|bench|chaos|common|demo|docs|inference|infra|metering|migrations|proto|sdk|tests)"
    r"/[\w./-]*)(?:::([\w.]+))?`"
)
# In the README of a package: a module below it, such as `settings.py` or `core/settings.py`.
NAMED_MODULE = re.compile(r"`([\w/]+\.py)`")


@dataclass(frozen=True)
class Source:
    """File of the repository: its path from the root with `/`, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed module. For Python files only."""
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full dotted name of every import, including those inside functions."""
        return list(imports(self, ast.walk(self.tree)))

    @property
    def module(self) -> str:
        """Dotted name by which the module is imported; for an `__init__`, that of the package."""
        path = self.path.removeprefix(SDK).removesuffix(".py").removesuffix("/__init__")
        return path.replace("/", ".")

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py") and not GENERATED.search(self.path)


@dataclass(frozen=True, slots=True)
class Finding:
    """Violation of a rule, with its location."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


Rule = Callable[[Source], Iterator[Finding]]
RepositoryRule = Callable[[Iterable[Source]], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Border:
    """Rule that files under `inside` must not import some modules.

    Files in `save_for` and names in `but` are exempt.
    """

    imported: tuple[str, ...]
    inside: tuple[str, ...]
    why: str
    save_for: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def is_crossed_by(self, path: str, name: str) -> bool:
        guarded = path.startswith(self.inside) and not path.startswith(self.save_for)
        return guarded and within(name, self.imported) and not within(name, self.but)


BORDERS = (
    Border(
        ("chaos",),
        inside=PRODUCT,
        save_for=("chaos/",),
        why="fault injection is a tool of testers, beside the product",
    ),
    Border(
        ("inference",),
        inside=("api/",),
        save_for=(
            "api/__main__.py",
            "api/serving.py",
            "api/core/settings.py",
            "api/fleet/",
            "api/cli/",
        ),
        but=(
            "inference.engine",
            "inference.routing.router",
            "inference.errors",
            "inference.safety.safety",
            *TEXT_FOR_API,
        ),
        why="the API knows the engine protocol; only the composition roots build concrete engines,"
        " and settings are declared beside their owners",
    ),
    Border(
        ("api", "inference", "metering", "migrations"),
        inside=("common/",),
        why="shared code is independent of its users",
    ),
    Border(
        ("api", "metering", "migrations"),
        inside=("inference/",),
        why="engines are independent of tenants, money and the wire",
    ),
    Border(
        ("grpc",),
        inside=("inference/",),
        save_for=("inference/adapters/remote_", "inference/doctor/remote.py"),
        why="engines are independent of the wire, except remote ones",
    ),
    Border(
        ("smg_grpc_proto",),
        inside=PRODUCT,
        save_for=("inference/adapters/remote_",),
        why="an optional package that only remote engines need",
    ),
    Border(
        ("pynvml",),
        inside=PRODUCT,
        save_for=("common/gpus.py",),
        why="an optional package, for machines with GPUs",
    ),
    Border(
        ("sqlalchemy", "psycopg", "alembic"),
        inside=("inference/",),
        why="engines do not use the database",
    ),
    Border(
        ("api", "inference", "migrations"),
        inside=("metering/",),
        why="metering is independent of its callers",
    ),
    Border(("grpc",), inside=("metering/",), why="metering is independent of the wire"),
    Border(
        ("metering",),
        inside=("metering/core/",),
        but=("metering.core",),
        why="every package of metering imports core, so core imports none of them",
    ),
    Border(
        tuple(f"metering.{package}" for package in METERING_PACKAGES),
        inside=("metering/store/",),
        why="database access is independent of the stored data",
    ),
    Border(
        (
            "metering.ledger",
            "metering.plans",
            "metering.invoicing",
            "metering.reports",
            "metering.export",
        ),
        inside=("metering/tenants/", "metering/quotas/", "metering/holds/", "metering/control/"),
        why="admission uses prices, and is independent of ledger, invoices and billing",
    ),
    Border(
        ("metering.alerts",),
        inside=tuple(
            f"metering/{each}/"
            for each in ("tenants", "quotas", "holds", "control", *BILLING_PACKAGES)
        ),
        why="counting and billing are independent of alerts, which poll the counters",
    ),
    Border(
        ("metering.holds",),
        inside=("metering/receipts/",),
        why="receipts are independent of how usage is settled",
    ),
    Border(
        ("cryptography",),
        inside=PRODUCT,
        save_for=("metering/receipts/signing.py", "api/generation/request/peers.py", "sdk/"),
        why="one module signs, and one identifies processes",
    ),
    Border(
        ("metering.export", "metering.configuration"),
        inside=tuple(f"metering/{each}/" for each in BILLING_PACKAGES),
        why="amounts due are independent of how they are collected",
    ),
    Border(
        ("metering.proof",),
        inside=("metering/",),
        save_for=("metering/proof/", "metering/tasks.py"),
        why="the ledger is independent of its audit",
    ),
    Border(
        tuple(f"metering.{package}" for package in METERING_PACKAGES if package != "proof"),
        inside=("metering/proof/",),
        why="an audit that uses the audited code repeats its mistakes",
    ),
    Border(
        ("api", "common", "inference", "metering", "weir", "weir_cli", "weir_client"),
        inside=("migrations/",),
        save_for=("migrations/env.py",),
        why="a revision must keep its meaning when the code changes",
    ),
    Border(
        ("api", "inference", "weir"),
        inside=("migrations/env.py",),
        why="env.py uses only the models",
    ),
    Border(
        ("api", "common", "inference", "metering", "migrations", "weir_commands"),
        inside=("sdk/",),
        why="the SDK installs alone",
    ),
    Border(
        ("weir_cli", "typer", "rich", "yaml"),
        inside=("sdk/python/src/weir_client/",),
        why="programs that use the SDK need no command line",
    ),
    Border(
        ("weir",),
        inside=PRODUCT,
        save_for=(
            *("api/", "sdk/", "infra/walk.py", "bench/observations.py", "bench/grpc_load.py"),
            *("bench/adversary_attacks.py", "bench/adversary_load.py"),
        ),
        why="only the edge uses generated messages",
    ),
    Border(
        ("torch",),
        inside=PRODUCT,
        save_for=(
            "inference/",
            "demo/",
            "bench/engine.py",
            "bench/steps.py",
            "bench/gpu/",
        ),
        why="only engines use tensors",
    ),
    Border(
        ("torch", "tensorrt_llm"),
        inside=(
            *("inference/routing/", "inference/workers/", "inference/adapters/"),
            *("inference/doctor/", "inference/text/"),
        ),
        save_for=(
            "inference/adapters/torch_worker.py",
            "inference/doctor/embedded.py",
            "inference/adapters/tensorrt_library.py",
        ),
        why="the API process places sequences and talks to workers, which do the computing",
    ),
    Border(
        ("inference.core", "inference.workers", "inference.routing", "inference.adapters"),
        inside=(
            "inference/checkpoint/",
            "inference/decoder/",
            "inference/sampling/",
            "inference/text/",
        ),
        why="the parts of a step are independent of the engine that runs it",
    ),
    Border(
        ("inference.workers", "inference.routing", "inference.adapters", "socket", "asyncio"),
        inside=("inference/core/",),
        why="the engine is independent of processes, and knows only ordinary sequences",
    ),
    Border(
        ("api.generation", "api.admin", "api.openai", "grpc", "weir", "metering"),
        inside=("api/queue/",),
        but=("metering.core.models",),
        why="the queue decides the order without sockets and without the database",
    ),
    Border(
        ("metering", "inference", "sqlalchemy", "psycopg"),
        inside=("api/console/",),
        save_for=("api/console/sign_in.py",),
        why="the console uses only the calls of the contract; persons sign in before any call",
    ),
    Border(
        ("api.console",),
        inside=("api/",),
        save_for=("api/console/", "api/serving.py", "api/cli/"),
        why="everything works without the console",
    ),
    Border(
        ("api",),
        inside=("api/core/",),
        but=("api.core",),
        why="every package of the API imports core, so core imports none of them",
    ),
    Border(
        ("api.admin", "api.openai", "api.cli"),
        inside=("api/access/", "api/queue/", "api/generation/", "api/fleet/"),
        why="requests are independent of administration, billing and clients",
    ),
    Border(
        ("sqlalchemy",),
        inside=("api/",),
        but=("sqlalchemy.ext", "sqlalchemy.exc", "sqlalchemy.engine"),
        why=(
            "statements are in metering, beside the tables that they read; the API passes"
            " sessions on"
        ),
    ),
    Border(
        ("weir_cli", "weir_client"),
        inside=("api/", "common/", "inference/", "metering/"),
        save_for=(
            *("api/cli/", "api/fleet/fleet_file.py", "api/fleet/launcher_reader.py"),
            "api/access/providers.py",
        ),
        why="the server does not call itself as a client; only commands do, and files of the"
        " operator are read as their YAML is",
    ),
    Border(
        ("transformers",),
        inside=PRODUCT,
        save_for=(
            "inference/safety/classifier_worker.py",
            "bench/engine.py",
            "bench/gpu/measure.py",
            "demo/train_encoder.py",
        ),
        why="an optional package that only the classifiers' process needs",
    ),
    Border(
        ("tensorrt_llm",),
        inside=PRODUCT,
        save_for=("inference/adapters/tensorrt_library.py",),
        why="one adapter wraps TensorRT-LLM",
    ),
    Border(
        ("celery", "kombu"),
        inside=PRODUCT,
        save_for=("metering/celery_app.py", "metering/tasks.py"),
        why="tasks are thin; the functions that they call work without a broker",
    ),
    Border(
        ("aiohttp",),
        inside=PRODUCT,
        save_for=(
            *("api/openai/", "api/console/", "api/scim/", "api/metrics/operator_http.py"),
            *("metering/core/outbound.py", "metering/alerts/webhooks.py"),
            "metering/export/stripe_inbox.py",
            "inference/adapters/remote_http.py",
            "inference/adapters/remote_http_connection.py",
            *("inference/launchers/http.py", "api/fleet/endpoint_slices.py"),
            *("bench/http_api_load.py", "bench/hostile_upstream.py", "bench/service.py"),
            "bench/pool.py",
        ),
        why="only OpenAI's API, console, SCIM, metrics, webhooks, remote engines and launchers use"
        " HTTP",
    ),
    Border(
        ("joserfc",),
        inside=PRODUCT,
        save_for=("api/access/issuer_keys.py", "api/access/issuers.py", "bench/site.py"),
        why="tokens of issuers are verified in one place",
    ),
    Border(
        ("opentelemetry",),
        inside=PRODUCT,
        save_for=("api/observability/otlp.py", "api/metrics/otlp.py", "bench/observations.py"),
        why="an optional package that only the export of spans and metrics needs",
    ),
    Border(
        ("prometheus_client",),
        inside=PRODUCT,
        save_for=("api/metrics/", "bench/observations.py"),
        why="counters are plain numbers, which become metrics when they are scraped",
    ),
    Border(
        ("openai",),
        inside=PRODUCT,
        save_for=("bench/http_api.py",),
        why="OpenAI's client only tests the HTTP API",
    ),
    Border(
        ("reportlab",),
        inside=PRODUCT,
        save_for=("metering/invoicing/invoice_pdf.py",),
        why="one module draws invoices",
    ),
    Border(
        ("stripe",),
        inside=PRODUCT,
        save_for=("metering/export/stripe_gateway.py",),
        why="one gateway wraps Stripe",
    ),
)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of `prefixes` or inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def imports(source: Source, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of every import in the nodes of a module.

    Resolves relative imports; `import_module("x")` and `__import__("x")` count like `import x`.
    """
    package = source.path.removeprefix(SDK).split("/")[:-1]
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function) in (
                    "import_module",
                    "importlib.import_module",
                    "__import__",
                ):
                    yield node.lineno, name


def borders_hold(source: Source) -> Iterator[Finding]:
    """Find imports that a `Border` forbids."""
    for line, name in source.imports:
        for border in BORDERS:
            if border.is_crossed_by(source.path, name):
                yield Finding(source.path, line, f"imports {name}: {border.why}")


def tensorrt_is_imported_late(source: Source) -> Iterator[Finding]:
    """Find module-level imports of TensorRT-LLM, which take seconds and fail without a GPU."""
    for line, name in imports(source, outside_functions(source.tree)):
        if source.path.startswith(PRODUCT) and within(name, ("tensorrt_llm",)):
            yield Finding(
                source.path,
                line,
                f"imports {name} at module level: import it where the engine is built",
            )


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: all outside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            yield from outside_functions(node)


def tasks_have_parents(source: Source) -> Iterator[Finding]:
    """Find tasks that are not started on a TaskGroup.

    The event loop keeps only a weak reference to a task: one without a parent can be collected
    while it runs, its exception is lost, and it outlives the request that it works for.
    """
    if source.path.startswith(PRODUCT) and source.path not in DETACHED_TASKS:
        yield from detached_tasks(source)


def detached_tasks(source: Source) -> Iterator[Finding]:
    """Find calls that start a task on anything other than one of the module's TaskGroups."""
    groups = task_groups(source.tree)
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=on, attr="create_task")):
                if last_name(on) not in groups:
                    yield Finding(
                        source.path,
                        node.lineno,
                        f"{ast.unparse(node.func)} starts a task without a parent",
                    )
            case ast.Attribute(attr="ensure_future") | ast.Name(id="ensure_future" | "create_task"):
                yield Finding(
                    source.path, node.lineno, f"{ast.unparse(node)} starts a task without a parent"
                )


def task_groups(tree: ast.Module) -> set[str]:
    """Collect the names that hold a TaskGroup, by `async with`, annotation or assignment."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target) if (
                makes_group(value)
            ):
                names.add(last_name(target))
            case ast.arg(arg=name, annotation=ast.expr() as annotation) if (
                "TaskGroup" in ast.unparse(annotation)
            ):
                names.add(name)
            case ast.AnnAssign(target=target, annotation=annotation) if "TaskGroup" in ast.unparse(
                annotation
            ):
                names.add(last_name(target))
            case ast.Assign(targets=[target], value=value) if makes_group(value):
                names.add(last_name(target))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=ast.Name(id=name)) if name in names:
                names.add(last_name(target))
    return names


def makes_group(value: ast.expr) -> bool:
    """Return whether an expression creates a TaskGroup, or enters one on an exit stack."""
    match value:
        case ast.Await(value=inner):
            return makes_group(inner)
        case ast.Call(func=ast.Attribute(attr="enter_async_context"), args=[inner]):
            return makes_group(inner)
        case ast.Call(func=function):
            return last_name(function).endswith("TaskGroup")
    return False


def last_name(expression: ast.expr) -> str:
    """Return `c` of `a.b.c`, or an empty string for an expression without such a name."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def moments_start_at_no_number(source: Source) -> Iterator[Finding]:
    """Find points in time with a number as initial value, instead of `-math.inf` or None.

    A monotonic clock may start at zero at boot, so `clock() - 0.0` can mean "just now".
    """
    if not source.path.startswith(PRODUCT):
        return
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Assign(
                    targets=[ast.Name() | ast.Attribute() as target],
                    value=ast.Constant(value=float()),
                )
                | ast.AnnAssign(
                    target=ast.Name() | ast.Attribute() as target, value=ast.Constant(value=float())
                )
            ) if MOMENT.search(last_name(target)):
                yield Finding(
                    source.path,
                    node.lineno,
                    f"{last_name(target)} starts at a number of seconds: use -math.inf or None",
                )


def modules_say_what_they_are(source: Source) -> Iterator[Finding]:
    """Find modules without a docstring."""
    if source.is_python and not ast.get_docstring(source.tree):
        yield Finding(source.path, 1, "has no module docstring")


def constants_are_at_the_head(source: Source) -> Iterator[Finding]:
    """Find modules with three or more constants after the first class or function.

    A constant is an assignment to upper-case names in the module's body. SQL may stand beside the
    function that executes it: see `is_sql`.
    """
    late = late_constants(source)
    if len(late) > LATE_CONSTANTS_MAX:
        yield Finding(
            source.path,
            late[0][0],
            f"assigns {', '.join(name for _, name in late)} after the first definition: constants"
            " stand at the head of the file or in a class",
        )


def signatures_are_short(source: Source) -> Iterator[Finding]:
    """Find functions with too many parameters, `self` and `cls` excluded, to keep them apart.

    Kernels, decorated with `@triton.jit`, are exempt: Triton compiles plain values only. Generated
    code is exempt too.
    """
    for node in ast.walk(source.tree) if source.path.startswith(PRODUCT) else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            of = node.args
            each = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))]
            count = sum(name.arg not in ("self", "cls") for name in each)
            kernel = any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
            if count > PARAMETERS_MAX and not kernel and "/generated_" not in source.path:
                what = f"{node.name} has {count} parameters, at most {PARAMETERS_MAX} are allowed"
                yield Finding(source.path, node.lineno, f"{what}: group some in a record")


def late_constants(source: Source) -> list[tuple[int, str]]:
    """List line and name of the constants after the first class or function, without SQL."""
    late: list[tuple[int, str]] = []
    is_late = False
    for node in source.tree.body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                is_late = True
            case (
                ast.Assign(targets=[target, *_], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ) if is_late:
                name = ast.unparse(target)
                if name.isupper() and not is_sql(value):
                    late.append((node.lineno, name))
    return late


def is_sql(value: ast.expr) -> bool:
    """Return whether a text in the expression begins with an SQL verb, or is a fragment of SQL.

    A fragment has several lines, and an SQL keyword in capitals or an SQL function.
    """
    return any(
        SQL_VERB.match(node.value) or ("\n" in node.value and SQL_WORD.search(node.value))
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def classes_are_one_concept(source: Source) -> Iterator[Finding]:
    """Find classes in api/ and inference/ with more methods than one concept has."""
    is_held = source.path.startswith(("api/", "inference/"))
    for node in ast.walk(source.tree) if is_held else ():
        if isinstance(node, ast.ClassDef):
            count = sum(
                isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body
            )
            if count > METHODS_MAX:
                what = f"{node.name} has {count} methods, at most {METHODS_MAX} are allowed"
                yield Finding(source.path, node.lineno, f"{what}: split it by responsibility")


def nothing_is_left_undone(source: Source) -> Iterator[Finding]:
    """Find notes on unfinished work, which belongs in an issue."""
    yield from lines_with(UNFINISHED, source, "contains {}: write an issue instead")


def nothing_names_one_machine(source: Source) -> Iterator[Finding]:
    """Find paths that exist on one machine only, and addresses of package indexes."""
    yield from lines_with(MACHINE_PATH, source, "names a path of one machine: {}")
    text = source.text.replace(TORCH_CPU_INDEX, "") if source.path == INSTALLER else source.text
    what = "names a source of packages: {}; leave that to pip's settings"
    yield from lines_with(PACKAGE_SOURCE, Source(source.path, text), what)


def packages_are_installed_from_a_clone(source: Source) -> Iterator[Finding]:
    """Find instructions to install Weir or its clients from an index where none is published."""
    if source.path != RELEASE_NOTES:
        remedy = (
            "{} is not published: install from a clone, as in pip install -e sdk/python -e"
            " '.[otel]'"
        )
        yield from lines_with(UNPUBLISHED_PACKAGE, source, remedy)


def lines_with(pattern: re.Pattern[str], source: Source, what: str) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := pattern.search(line):
            yield Finding(source.path, number, what.format(found[0]))


Location = tuple[str, int]  # a file and a line


def packages_form_no_cycle(sources: Iterable[Source]) -> Iterator[Finding]:
    """Find cycles of packages in a top-level folder, including imports for type checking.

    You cannot understand, move or test one package of a cycle without the others.
    """
    imported = package_imports(sources)
    for package, locations in imported.items():
        for target, (path, line) in locations.items():
            if package in reachable(imported, target):
                yield Finding(
                    path,
                    line,
                    f"{package} imports {target}, which imports {package}, maybe indirectly",
                )


def modules_form_no_cycle(sources: Iterable[Source]) -> Iterator[Finding]:
    """Find cycles of modules, including imports for type checking and inside functions.

    You cannot read one module of a cycle without the others.
    """
    for module, target, (path, line) in cyclic_imports(sources):
        yield Finding(
            path, line, f"{module} imports {target}, which imports {module}, maybe indirectly"
        )


def cyclic_imports(sources: Iterable[Source]) -> Iterator[tuple[str, str, Location]]:
    """Yield each import that is part of a cycle: the module, the imported one, and the place."""
    imported = module_imports(sources)
    reached = {module: reachable(imported, module) for module in imported}
    for module, locations in imported.items():
        for target, location in locations.items():
            if module in reached[target]:
                yield module, target, location


def module_imports(sources: Iterable[Source]) -> dict[str, dict[str, Location]]:
    """Map each module to the modules that it imports, with the first place of each import.

    `from package import module` imports the module, and not the package.
    """
    modules = {
        source.module: source
        for source in sources
        if source.is_python and source.path.startswith(ACYCLIC)
    }
    imported: dict[str, dict[str, Location]] = {module: {} for module in modules}
    for module, source in modules.items():
        for line, name in source.imports:
            target = name
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != module:
                imported[module].setdefault(target, (source.path, line))
    return imported


def package_imports(sources: Iterable[Source]) -> dict[str, dict[str, Location]]:
    """Map each package to the packages of its folder that it imports, with the first place."""
    imported: dict[str, dict[str, Location]] = {}
    for module, locations in module_imports(sources).items():
        package = package_of(module)
        if package:
            targets = imported.setdefault(package, {})
            for target, location in locations.items():
                other = package_of(target)
                if other not in ("", package) and other.split(".")[0] == package.split(".")[0]:
                    targets.setdefault(other, location)
    return imported


def package_of(module: str) -> str:
    """Shorten `api.queue.x` and `api.queue` to `api.queue`, names outside `PACKAGED` to ""."""
    parts = module.split(".")[:2]
    return ".".join(parts) if len(parts) == 2 and f"{parts[0]}/" in PACKAGED else ""


def reachable(imported: dict[str, dict[str, Location]], name: str) -> set[str]:
    """Collect the packages or modules that `name` imports, directly or indirectly."""
    seen, unread = set[str](), [name]
    while unread:
        new = imported[unread.pop()].keys() - seen
        seen |= new
        unread += new
    return seen


def borders_guard_something(sources: Iterable[Source]) -> Iterator[Finding]:
    """Find borders that name files or modules which do not exist, and so have no effect."""
    paths = [source.path for source in sources]
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in paths
        if path.endswith(".py")
    ]
    tops = {module.split(".")[0] for module in modules}
    for border in BORDERS:
        ours = [name for name in (*border.imported, *border.but) if name.split(".")[0] in tops]
        lost = [
            prefix
            for prefix in (*border.inside, *border.save_for)
            if not any(path.startswith(prefix) for path in paths)
        ]
        for name in lost + [
            name for name in ours if not any(within(module, (name,)) for module in modules)
        ]:
            yield Finding(
                "infra/architecture.py",
                1,
                f"a border names {name}, which does not exist: {border.why}",
            )


def page_names_what_exists(sources: Iterable[Source]) -> Iterator[Finding]:
    """Find paths and names of code in pages that do not exist, and packages that
    docs/architecture.md does not name."""
    sources = list(sources)
    by_path = {source.path: source for source in sources}
    folders = {f"{folder}/" for path in by_path for folder in map(str, Path(path).parents)}
    described = set()
    for page in sources:
        if not PAGES.fullmatch(page.path):
            continue
        folder = page.path.removesuffix("README.md")
        below = [path for path in by_path if folder in PACKAGED and path.startswith(folder)]
        for number, line in enumerate(page.text.splitlines(), 1):
            for module in NAMED_MODULE.findall(NAMED_PATH.sub("", line)) if below else ():
                if module not in by_path and not any(path.endswith(f"/{module}") for path in below):
                    yield Finding(page.path, number, f"names {module}, which does not exist")
            for path, name in NAMED_PATH.findall(line):
                if page.path == PAGE:
                    described.add(path)
                if path not in by_path and path.rstrip("/") + "/" not in folders:
                    yield Finding(page.path, number, f"names {path}, which does not exist")
                elif name and (path not in by_path or name not in names_of(by_path[path])):
                    yield Finding(page.path, number, f"names {name}, which {path} does not define")
    packages = {package.replace(".", "/") + "/" for package in package_imports(sources)}
    for folder in sorted((packages & folders) - described):
        yield Finding(PAGE, 1, f"does not name the package {folder}")


def names_of(source: Source) -> set[str]:
    """Collect the functions, classes and constants of a module, and members as `Class.name`.

    In files of other languages, every word is a name.
    """
    if not source.is_python:
        return set(re.findall(r"\w+", source.text))
    names: set[str] = set()

    def collect(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef(name=name, body=members):
                    names.add(prefix + name)
                    collect(members, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(prefix + name)
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                    names.update(
                        prefix + each.id for each in ast.walk(target) if isinstance(each, ast.Name)
                    )

    collect(source.tree.body, "")
    return names


def code_does_not_grow(sources: Iterable[Source]) -> Iterator[Finding]:
    """Check that no part has more lines than allowed, and the product no more modules.

    A new feature needs a simplification in the same part.
    """
    here = "infra/architecture.py", 1
    files = [
        source
        for source in sources
        if CODE.search(source.path) and "/generated_" not in source.path
    ]
    count = sum(source.is_python and source.path.startswith(PACKAGED) for source in files)
    if count > MODULES_MAX:
        yield Finding(*here, f"the product has {count} modules, at most {MODULES_MAX} are allowed")
    counts = dict.fromkeys(LINES_MAX, 0)
    for source in files:
        parts = (part for part, (paths, _) in LINES_MAX.items() if source.path.startswith(paths))
        if (part := next(parts, None)) is not None:
            counts[part] += source.text.count("\n")
        elif not source.path.startswith(UNLIMITED):
            yield Finding(source.path, 1, "belongs to no part of LINES_MAX: add its folder there")
    for part, (_, limit) in LINES_MAX.items():
        if counts[part] > limit:
            what = f"{part}: {counts[part]} lines, at most {limit} are allowed"
            yield Finding(*here, what)


class Rules:
    """Registry of the rules: for Python files, for all files, and for the whole repository."""

    PYTHON: tuple[Rule, ...] = (  # each Python file
        borders_hold,
        tensorrt_is_imported_late,
        tasks_have_parents,
        moments_start_at_no_number,
        modules_say_what_they_are,
        constants_are_at_the_head,
        classes_are_one_concept,
        signatures_are_short,
    )
    TEXT: tuple[Rule, ...] = (  # each file
        nothing_is_left_undone,
        nothing_names_one_machine,
        packages_are_installed_from_a_clone,
    )
    REPOSITORY: tuple[RepositoryRule, ...] = (  # all files together
        packages_form_no_cycle,
        modules_form_no_cycle,
        borders_guard_something,
        page_names_what_exists,
        code_does_not_grow,
    )


def repository() -> list[Source]:
    """Read all text files that git tracks or would add, except generated code and non-UTF-8."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listing, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    sources: list[Source] = []
    for name in sorted(set(filter(None, names))):
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and not GENERATED.search(name):
            try:
                sources.append(Source(name, path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
    return sources


def broken(rule: Rule, sources: list[Source]) -> list[Finding]:
    """Apply a rule to the files that it is for, and return its findings."""
    return [
        finding
        for source in sources
        if source.is_python or rule in Rules.TEXT
        for finding in rule(source)
    ]
