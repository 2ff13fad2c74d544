"""The program: help, the tables of commands, completion, `--json`, exit codes, and how little it loads."""

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
from pathlib import Path
from typing import Any

import pytest
from weir_cli.__main__ import COMMANDS, load
from weir_cli.commands import CLIENT_COMMANDS, PERSONAS

from tests.cli.conftest import Run, ScriptedWeir

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "weir_cli"]
HELP_CPU_S = 0.3  # of one processor; measured: 0.06 s
# Commands that print no data: they run until stopped, act, or print what a shell, a browser or a file takes as it is.
WITHOUT_JSON = {
    *("up", "serve", "worker", "migrate", "demo", "stripe webhooks"),
    *("stripe resend", "stripe settle"),
    *("env", "console", "stripe portal", "receipt export", "receipt rotate"),
}


def test_every_command_of_the_tables_loads() -> None:
    for name in COMMANDS:
        assert load(name).name == name
    assert "rotate" in load("receipt").commands


def test_help_lists_every_command_on_one_screen_and_unknown_ones_are_refused(bare_weir: Run) -> None:
    listed = bare_weir("--help").stdout

    for name, entry in COMMANDS.items():
        assert (entry.help in listed) == (" " not in name), name
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0] in PERSONAS] == list(PERSONAS)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert bare_weir("nonsense").exit_code == 2
    assert "set" in bare_weir("quota", "--help").stdout


def test_the_entry_imports_nothing_heavy() -> None:
    """Help and completion must be quick: grpc, rich and the rest come with the command that is run."""
    heavy = "('grpc', 'rich', 'weir_client', 'importlib.metadata', 'torch', 'sqlalchemy', 'inference', 'metering')"
    code = (
        "import sys, weir_cli.__main__ as entry\n"
        "try:\n    entry.app(['--help'])\n"
        f"except SystemExit:\n    print([name for name in {heavy} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert said.splitlines()[-1] == "[]"


def test_client_commands_never_load_the_server() -> None:
    heavy = "('api', 'common', 'torch', 'sqlalchemy', 'psycopg', 'inference', 'metering', 'celery', 'stripe')"
    imports = "; ".join(f"import {entry.target.partition(':')[0]}" for entry in CLIENT_COMMANDS.values())
    code = f"import sys; {imports}; print([name for name in {heavy} if name in sys.modules])"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_without_the_server_the_client_commands_work(server: ScriptedWeir) -> None:
    missing = "'api', 'common', 'demo', 'inference', 'metering', 'weir_commands', 'torch', 'sqlalchemy', 'psycopg', 'celery'"
    code = f"import sys; sys.modules |= dict.fromkeys(({missing})); from weir_cli.__main__ import main; main()"
    environment = {**os.environ, "WEIR_ADDRESS": server.address, "WEIR_API_KEY": "weir_user"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)

    helped, asked, unknown = run("--help"), run("models", "--json"), run("up")

    assert (helped.returncode, asked.returncode, unknown.returncode) == (0, 0, 2)
    assert "generate" in helped.stdout
    assert "operator" not in helped.stdout
    assert json.loads(asked.stdout)[0]["name"]
    assert "No such command 'up'" in unknown.stderr


def test_help_takes_no_time() -> None:
    """Processor time of the quickest of three: that of the machine's clock is others' too."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    spent = []
    for _ in range(3):
        before_s = cpu_s()
        subprocess.run([*PROGRAM, "--help"], check=True, stdout=subprocess.DEVNULL)
        spent.append(cpu_s() - before_s)

    assert min(spent) < HELP_CPU_S


def leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands of a group by their full names, and the group itself if it does something alone."""
    subcommands = getattr(command, "commands", {})
    if not subcommands or command.invoke_without_command:
        yield name, command
    for each, subcommand in subcommands.items():
        yield from leaves(f"{name} {each}", subcommand)


def test_every_command_that_prints_data_takes_json() -> None:
    commands = dict(pair for name in COMMANDS if " " not in name for pair in leaves(name, load(name)))

    assert {name for name, command in commands.items() if not any("--json" in each.opts for each in command.params)} == WITHOUT_JSON


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
def test_the_shell_completes_commands_and_options(words: tuple[str, ...], expected: set[str]) -> None:
    asked = {"_WEIR_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}

    told = subprocess.run(PROGRAM, env=os.environ | asked, check=True, capture_output=True, text=True).stdout.split()

    assert expected <= set(told)
    assert all(each.startswith(words[-1]) for each in told)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_calls_the_program(shell: str) -> None:
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    told = subprocess.run([*PROGRAM, "--show-completion", shell], env=environment, check=True, capture_output=True, text=True)

    assert "_WEIR_COMPLETE" in told.stdout


def test_help_and_the_documents_tell_the_same_exit_codes(bare_weir: Run) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    table = re.findall(r"^\| (\d+) \| ", page.split("| exit code |")[1], re.MULTILINE)

    told = " ".join(bare_weir("--help").stdout.split()).split("Exit codes:")[1]
    assert re.findall(r"\d+", told) == table == ["0", "1", "2", "3", "130"]


def test_exit_codes(weir: Run, server: ScriptedWeir) -> None:
    """3 and 130 are tested where they come from: kills, drains, quotes; and interrupted answers."""
    assert weir("models").exit_code == 0
    assert weir("models", "--address", "127.0.0.1:1").exit_code == 1
    assert weir("models", "--no-such-option").exit_code == 2


def test_without_typer_the_program_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import weir_cli.__main__"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert said.returncode == 1
    assert (
        said.stderr == "error: the command line needs the extra `cli` of the client: pip install './sdk/python[cli]' in a clone\n"
    )


def project(path: str) -> dict[str, Any]:
    """A pyproject.toml of the repository."""
    return tomllib.loads((ROOT / path / "pyproject.toml").read_text())


def test_only_the_client_owns_the_program_and_no_package_is_in_both_distributions() -> None:
    """So that the two wheels may be installed, and one removed, in either order."""
    sources = ROOT / "sdk" / "python" / "src"
    client, server = project("sdk/python"), project(".")
    packaged = {each.rstrip("*") for each in server["tool"]["setuptools"]["packages"]["find"]["include"]}

    assert client["project"]["scripts"] == {"weir": "weir_cli.__main__:main"}
    assert "scripts" not in server["project"]
    assert packaged.isdisjoint(path.stem for path in sources.iterdir())
    assert (ROOT / "weir_commands" / "__init__.py").exists() is False, "a namespace package, which others may add to"


def test_the_wheel_of_the_client_holds_all_that_its_commands_import(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    shutil.copytree(ROOT / "sdk" / "python", tmp_path / "source")  # building leaves files behind
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tmp_path / "source", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    installed = tmp_path / "installed"
    zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]).extractall(installed)
    modules = sorted({entry.target.partition(":")[0] for entry in CLIENT_COMMANDS.values()})

    code = (
        f"import sys; sys.path = [{str(installed)!r}, *(each for each in sys.path if 'python3' in each)]\n"
        "sys.meta_path = [each for each in sys.meta_path if not getattr(each, '__module__', '').startswith('__editable__')]\n"
        f"for name in {modules}:\n    __import__(name)\n"
        "print(sorted({name.split('.')[0]: str(module.__file__ or module.__path__) for name, module in sys.modules.items() "
        "if name.startswith('weir')}.items()))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)

    assert said.returncode == 0, said.stderr
    found = dict(ast.literal_eval(said.stdout))
    assert set(found) == {"weir", "weir_cli", "weir_client", "weir_yaml"}
    assert all(str(installed) in path for path in found.values())
