"""Program: help, lists of commands, completion, `--json`, exit codes, and few imports."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner
from weir_cli.__main__ import COMMANDS, Group, app, early_last, load
from weir_cli.commands import CLIENT_COMMANDS, PERSONAS
from weir_cli.connection import Connection
from weir_cli.parameters import NAMES

from tests.cli.conftest import Run, ScriptedWeir

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "weir_cli"]
HELP_CPU_S = 0.3  # of CPU; measured: 0.06 s
HEAVY = (
    *("google.protobuf", "grpc", "importlib.metadata", "pydantic", "rich", "weir", "yaml"),
    *("cryptography", "numpy", "psycopg", "sqlalchemy", "torch", "inference", "metering"),
)
# Options that take any text; the others have a placeholder that says what belongs there.
FREE_TEXT = {
    *("audience", "algorithms", "keys_url", "lifetime_max", "token_type", "label_claims"),
    *("project_claim", "end_user_claim", "models_claim", "max_output_tokens_claim"),
    *("system", "stop", "regex", "region", "name", "reason", "subject", "actor", "action", "root"),
    *("legal_name", "address_line1", "address_line2", "city", "postal_code", "state", "country"),
    *("tax_id", "language", "check"),
}
# Commands that print no data: they run until stopped, act, or print text for a shell, browser or
# file.
WITHOUT_JSON = {
    *("up", "down", "logs", "serve", "worker", "migrate", "demo", "stripe webhooks"),
    *("stripe resend", "stripe settle"),
    *("env", "console", "stripe portal", "receipt export", "receipt rotate", "org verify-export"),
}


def test_every_command_of_the_tables_loads() -> None:
    for name in COMMANDS:
        assert load(name).name == name
    assert "rotate" in load("receipt").commands


def groups_with_a_list() -> dict[str, Group]:
    loaded = {name: load(name) for name in COMMANDS if " " not in name}
    return {
        name: command
        for name, command in loaded.items()
        if isinstance(command, Group) and command.lists_by_default
    }


def test_a_group_alone_runs_its_list() -> None:
    groups = groups_with_a_list()

    assert {"replicas", "org", "project", "key", "quota", "price", "alerts"} <= groups.keys()
    for name, group in groups.items():
        for written, run in (([], ["list"]), (["--json"], ["list", "--json"])):
            context = group.make_context(name, list(written))
            assert [*context._protected_args, *context.args] == run
        context = group.make_context(name, ["list"])
        assert f"{name} alone is {name} list." in group.get_help(context)


def test_help_fits_one_screen_and_unknown_commands_are_refused(bare_weir: Run) -> None:
    listed = bare_weir("--help").stdout

    for name, entry in COMMANDS.items():
        assert (entry.help in listed) == (" " not in name), name
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0] in PERSONAS] == list(PERSONAS)
    assert len(lines) <= 53
    assert max(map(len, lines)) <= 80
    assert bare_weir("nonsense").exit_code == 2
    assert "set" in bare_weir("quota --help").stdout


def test_no_help_imports_anything_heavy() -> None:
    """Help answers at once, of the program and of every group and command: only running a command
    imports gRPC, rich, the server and the rest.
    """
    code = f"""
import sys
from weir_cli.__main__ import COMMANDS, app, load

def paths(path, command):
    yield path
    for name, each in getattr(command, "commands", {{}}).items():
        yield from paths((*path, name), each)

names = [name for name in COMMANDS if " " not in name]
tree = [(), *(path for name in names for path in paths((name,), load(name)))]
for path in tree:
    try:
        app([*path, "--help"], prog_name="weir")
    except SystemExit as ended:
        loaded = [name for name in {HEAVY} if name in sys.modules]
        print(len(tree), " ".join(path), ended.code, loaded, file=sys.stderr)
"""
    message = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stderr.splitlines()

    assert len(message) > 90
    assert [line for line in message if not line.endswith(" 0 []")] == []


def test_client_commands_never_load_the_server() -> None:
    heavy = (
        "('api', 'common', 'torch', 'sqlalchemy', 'psycopg', 'inference', 'metering', 'celery',"
        " 'stripe')"
    )
    imports = "; ".join(
        f"import {entry.target.partition(':')[0]}" for entry in CLIENT_COMMANDS.values()
    )
    code = f"import sys; {imports}; print([name for name in {heavy} if name in sys.modules])"

    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


def test_without_the_server_the_client_commands_work(server: ScriptedWeir) -> None:
    missing = (
        "'api', 'chaos', 'common', 'demo', 'inference', 'metering', 'weir_commands', 'torch',"
        " 'sqlalchemy', 'psycopg', 'celery'"
    )
    code = (
        f"import sys; sys.modules |= dict.fromkeys(({missing})); from weir_cli.__main__ import"
        " main; main()"
    )
    environment = {**os.environ, "WEIR_ADDRESS": server.address, "WEIR_API_KEY": "weir_user"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )

    helped, requested, unknown = run("--help"), run("models", "--json"), run("up")

    assert (helped.returncode, requested.returncode, unknown.returncode) == (0, 0, 2)
    assert "generate" in helped.stdout
    assert "operator" not in helped.stdout
    assert json.loads(requested.stdout)[0]["name"]
    assert "No such command 'up'" in unknown.stderr


def test_help_takes_no_time() -> None:
    """CPU time of the quickest of three runs, as wall time depends on other processes."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    spent = []
    for _ in range(3):
        before_s = cpu_s()
        subprocess.run([*PROGRAM, "--help"], check=True, stdout=subprocess.DEVNULL)
        spent.append(cpu_s() - before_s)

    assert min(spent) < HELP_CPU_S


def tree() -> dict[tuple[str, ...], Any]:
    """Return every group and command by its words."""

    def below(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield path, command
        for name, each in getattr(command, "commands", {}).items():
            yield from below((*path, name), each)

    return dict(pair for name in COMMANDS if " " not in name for pair in below((name,), load(name)))


def is_group(command: Any) -> bool:
    return bool(getattr(command, "commands", {})) and not command.invoke_without_command


def test_every_command_and_option_has_a_help_text() -> None:
    for path, command in tree().items():
        assert command.help, path
        assert command.help.split("\n\n")[0].endswith("."), path
        for option in command.params:
            assert option.help, (path, option.name)


def test_every_command_refuses_an_unknown_option(bare_weir: Run) -> None:
    for path, command in tree().items():
        refused = bare_weir(*path, "--nonsense")

        assert (refused.exit_code, refused.stdout) == (2, ""), path
        assert f"Usage: weir {' '.join(path)}" in refused.stderr
        if not command.context_settings.get(
            "ignore_unknown_options"
        ):  # a negative amount is an argument
            assert "No such option: --nonsense" in refused.stderr


def test_the_shell_completes_every_group_and_the_options_of_every_command() -> None:
    found = completions([(*path, "" if is_group(each) else "--") for path, each in tree().items()])

    for (path, command), reported in zip(tree().items(), found, strict=True):
        names = (
            set(command.commands)
            if is_group(command)
            else {name for option in command.params for name in option.opts if name[:2] == "--"}
        )
        assert names <= reported, path


def completions(lines: list[tuple[str, ...]]) -> list[set[str]]:
    """Return the words that bash offers for the last word of each line."""
    found = []
    for words in lines:
        requested = {
            "_WEIR_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("weir", *words)),
            "COMP_CWORD": str(len(words)),
        }
        reported = CliRunner().invoke(
            app, [], prog_name="weir", env=requested, catch_exceptions=False
        )
        found.append(set(reported.stdout.split()))
    return found


def test_every_command_that_prints_data_takes_json() -> None:
    assert {
        " ".join(path)
        for path, command in tree().items()
        if not is_group(command) and not any("--json" in each.opts for each in command.params)
    } == WITHOUT_JSON


def test_placeholders_and_spellings_are_the_same_in_every_command() -> None:
    """An argument is a word in capitals; an organization has two spellings, `--home` is anywhere
    that an address is.
    """
    for path, command in tree().items():
        opts = {name for each in command.params for name in each.opts}
        assert ("--org" in opts) == ("--organization" in opts), path
        assert "--address" not in opts or "--home" in opts, path
        assert ("--json" in opts) == ("--wide" in opts) or is_group(command), path
        for each in command.params:
            if each.param_type_name == "argument":
                assert re.fullmatch("[A-Z_]+", each.metavar), (path, each.name)
            elif each.metavar is not None:
                assert re.fullmatch("[A-Z_=]+", each.metavar), (path, each.name)
                assert each.metavar != "TEXT" or each.name in FREE_TEXT, (path, each.name)
            elif not each.is_flag:
                assert each.type_descriptor.is_choice, (path, each.name)


def test_an_empty_name_is_refused_in_every_command(weir: Run) -> None:
    """`--org "$ORG"` without `ORG`: in each command, the option must name one or be left out."""
    flags = [
        (*path, each.opts[0])
        for path, command in tree().items()
        for each in command.params
        if each.param_type_name == "option" and each.metavar in NAMES
    ]

    assert len(flags) > 60
    for line in flags:
        result = weir(*line, "")
        assert result.exit_code == 2, line
        assert line[-1] in result.stderr, line
        assert "is empty: name one" in result.stderr, line


def test_every_parameter_with_a_known_name_completes(weir: Run) -> None:
    """The values come from the server, for options and for first arguments of every command."""
    expected = {
        "DIMENSION": "tokens-per-month",
        "END_USER": "alice",
        "KEY": "weir_ab12cd",
        "MODEL": "demo",
        "ORG": "acme",
        "PROJECT": "web",
        "SELECTOR": "end-user",
    }
    lines, values = [], []
    for path, command in tree().items():
        owner = ("--org", "acme") if any("--org" in each.opts for each in command.params) else ()
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        for each in command.params:
            if each.metavar in expected and each not in arguments[1:]:
                flag = () if each in arguments else each.opts[:1]
                lines.append((*path, *(() if each.metavar == "ORG" else owner), *flag, ""))
                values.append(expected[each.metavar])

    assert len(lines) > 60
    for line, value, found in zip(lines, values, completions(lines), strict=True):
        assert value in found or (value == "web" and not owner_of(line)), line


def owner_of(line: tuple[str, ...]) -> bool:
    """Return whether a line says whose projects to complete."""
    return "--org" in line


def test_completion_is_silent_without_a_server(
    bare_weir: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("WEIR_ADMIN_KEY", "weir_admin")

    assert completions([("key", "revoke", ""), ("month", "show", "")]) == [set(), set()]


@pytest.mark.parametrize(
    ("early", "usual"),
    [
        ("--json models", "models --json"),
        ("key --json list", "key list --json"),
        ("--json count -- hello", "count --json -- hello"),
        ("help key create", "key create --help"),
        ("help", "--help"),
    ],
)
def test_some_options_may_come_before_the_command(weir: Run, early: str, usual: str) -> None:
    first, second = weir(early), weir(usual)

    assert (first.exit_code, first.stdout) == (second.exit_code, second.stdout)
    assert "No such option" not in first.stderr


def test_the_value_of_an_option_is_not_taken_for_an_early_option() -> None:
    options = typer.main.get_command(app).params

    assert early_last(["--ca", "--json", "--wide", "key", "list"], options) == [
        *("--ca", "--json", "key", "list", "--wide")
    ]


def test_a_command_says_which_organization_it_assumes(
    weir: Run, server: ScriptedWeir, tmp_path: Path
) -> None:
    home = tmp_path / "elsewhere"
    home.mkdir()
    Connection(server.address, "weir_user", "weir_admin", "acme", "search").write(home)

    assumed = weir("project", "list", "--home", str(home))

    assert assumed.exit_code == 0, assumed.stderr
    assert "organization acme, that of `weir up`; --org chooses another" in assumed.stderr
    assert "acme" not in weir("project list --organization acme").stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("weir", ""), {"generate", "key", "month", "up"}),
        (("weir", "k"), {"key"}),
        (("weir", "key", ""), {"create", "rotate", "update", "revoke", "list", "show"}),
        (("weir", "receipt", "r"), {"rotate"}),
        (("weir", "generate", "--max"), {"--max-output-tokens", "--max-cost"}),
    ],
)
def test_the_shell_completes_commands_and_flags(words: tuple[str, ...], expected: set[str]) -> None:
    requested = {
        "_WEIR_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }

    reported = subprocess.run(
        PROGRAM, env=os.environ | requested, check=True, capture_output=True, text=True
    ).stdout.split()

    assert expected <= set(reported)
    assert all(each.startswith(words[-1]) for each in reported)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_calls_the_program(shell: str) -> None:
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    reported = subprocess.run(
        [*PROGRAM, "--show-completion", shell],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    assert "_WEIR_COMPLETE" in reported.stdout


def test_help_and_the_documents_state_the_same_exit_codes(bare_weir: Run) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    table = re.findall(r"^\| (\d+) \| ", page.split("| exit code |")[1], re.MULTILINE)

    reported = " ".join(bare_weir("--help").stdout.split()).split("Exit codes:")[1]
    assert re.findall(r"\d+", reported) == table == ["0", "1", "2", "3", "130"]


def test_exit_codes(weir: Run, server: ScriptedWeir) -> None:
    """3 and 130 are tested with kills, drains, quotes and interrupted answers."""
    assert weir("models").exit_code == 0
    assert weir("models --address 127.0.0.1:1").exit_code == 1
    assert weir("models --no-such-option").exit_code == 2


def test_without_typer_the_program_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import weir_cli.__main__"

    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert message.returncode == 1
    assert (
        message.stderr == "error: the command line needs the extra `cli` of the client: pip install"
        " './sdk/python[cli]' in a clone\n"
    )


def project(path: str) -> dict[str, Any]:
    """Return a pyproject.toml of the repository."""
    return tomllib.loads((ROOT / path / "pyproject.toml").read_text())


def test_only_the_client_owns_the_program_and_no_package_is_in_both_distributions() -> None:
    """The two wheels can be installed, and one removed, in either order."""
    sources = ROOT / "sdk" / "python" / "src"
    client, server = project("sdk/python"), project(".")
    packaged = {
        each.rstrip("*") for each in server["tool"]["setuptools"]["packages"]["find"]["include"]
    }

    assert client["project"]["scripts"] == {"weir": "weir_cli.__main__:main"}
    assert "scripts" not in server["project"]
    assert packaged.isdisjoint(path.stem for path in sources.iterdir())
    assert (ROOT / "weir_commands" / "__init__.py").exists() is False, (
        "a namespace package, which others may add to"
    )


def test_the_wheel_of_the_client_holds_all_that_its_commands_import(tmp_path: Path) -> None:
    # Not imported here: it refuses a distutils that another test has loaded.
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    shutil.copytree(ROOT / "sdk" / "python", tmp_path / "source")  # building leaves files behind
    build = (
        "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    )
    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=tmp_path / "source",
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    installed = tmp_path / "installed"
    zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]).extractall(installed)
    modules = [
        f"{package}.{path.stem}"
        for package in ("weir_cli", "weir_client")
        for path in sorted((installed / package).glob("*.py"))
    ]

    code = (
        f"import sys; sys.path = [{str(installed)!r}, *(each for each in sys.path if 'python3' in"
        " each)]\nsys.meta_path = [each for each in sys.meta_path if not getattr(each,"
        f" '__module__', '').startswith('__editable__')]\nfor name in {modules}:\n   "
        " __import__(name)\nprint(sorted({name.split('.')[0]: str(module.__file__ or"
        " module.__path__) for name, module in sys.modules.items() if"
        " name.startswith('weir')}.items()))"
    )
    message = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )

    assert message.returncode == 0, message.stderr
    found = dict(ast.literal_eval(message.stdout))
    assert set(found) == {"weir", "weir_cli", "weir_client"}
    assert all(str(installed) in path for path in found.values())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("quota remove", "'delete'"),
        ("key rm", "'revoke'"),
        ("org ls", "'list'"),
        ("month get", "'list', 'show'"),
        ("project add", "'create'"),
    ],
)
def test_the_word_of_another_program_leads_to_the_command(
    weir: Run, words: str, meant: str
) -> None:
    refused = weir(words)

    assert refused.exit_code == 2
    assert f"No such command {words.split()[1]!r}. Did you mean {meant}?" in refused.stderr


@pytest.mark.parametrize(
    "words", ["apply FILE", "plan create FILE", "price simulate 2026-10 --prices FILE"]
)
@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "No such file or directory"), (b"\xff", "it is not text in UTF-8")],
)
def test_a_file_that_cannot_be_read_has_one_plain_cause(
    weir: Run, tmp_path: Path, words: str, content: bytes | None, cause: str
) -> None:
    file = tmp_path / "given"
    if content is not None:
        file.write_bytes(content)

    refused = weir(words.replace("FILE", str(file)))

    assert refused.exit_code == 2
    assert refused.stderr.splitlines() == [f"error: {file} cannot be read: {cause}"]


def test_an_option_out_of_range_is_refused_in_plain_words(weir: Run) -> None:
    refused = weir("audit --limit 0")

    assert refused.exit_code == 2
    assert "Invalid value for '--limit': must be greater than or equal to 1" in refused.stderr
