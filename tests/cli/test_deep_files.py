"""Files that refer to themselves, are nested too deeply, or have too many values: the error names
file and line, and reading ends soon.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from weir_cli.document import read_document

from api.fleet.fleet_file import parse_fleet, read_fleet
from common.settings import SettingInvalid
from inference.checkpoint.json_files import read_json
from inference.errors import CheckpointInvalid
from inference.safety.safety import SafetyRulesInvalid
from inference.safety.safety_file import read_safety
from tests.growth import Call, as_in_service, check_cost, check_growth

LETTERS = "bcdefghijklmnopqrstuvwxyz"
YAML = {
    "a merge of itself": "\nmodels: &m\n  <<: *m\n",
    "a value of itself": "\nmodels: &m\n\n  a: *m\n",
    "many brackets": "\n\nmodels: " + "[" * 5000 + "]" * 5000,
    "many levels": "\n" * 2 + "".join(" " * level + "a:\n" for level in range(100)),
    "aliases of aliases": "a: &a [x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("a" + LETTERS, LETTERS, strict=False)),
    "merges of merges": "a: &a {x: 1}\n"
    + "".join(
        f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in zip("a" + LETTERS, LETTERS, strict=False)
    ),
}
LINES = {
    "a merge of itself": 3,
    "a value of itself": 4,
    "many brackets": 3,
    "many levels": 66,
    "aliases of aliases": 17,
    "merges of merges": 17,
}

READERS: dict[str, Callable[[str], object]] = {
    "fleet": lambda content: parse_fleet(content, Path("/x/fleet.yaml")),
    "configuration": lambda content: read_document(content, prune=False),
}


@pytest.mark.parametrize("case", YAML)
def test_a_fleet_file_names_the_line(case: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(YAML[case])

    with pytest.raises(SettingInvalid) as caught:
        read_fleet(file)

    assert f"{str(file)!r}:\n  line {LINES[case]}: " in str(caught.value)


@pytest.mark.parametrize("case", YAML)
def test_a_configuration_names_the_line(case: str) -> None:
    errors = read_document(YAML[case], prune=False).errors

    assert [error.line for error in errors] == [LINES[case]]


def test_the_configuration_of_an_engine_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("\na: &a\n  b: *a\n")
    fleet = "models: {m: {engine: tensorrt, directory: /x, engine_config: engine.yaml}}"

    with pytest.raises(SettingInvalid, match=r"engine\.yaml: line 3: .*part of itself"):
        parse_fleet(fleet, tmp_path / "fleet.yaml")


def test_a_safety_file_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "safety.toml"
    file.write_text("\n\na = " + "[" * 50_000)

    with pytest.raises(SafetyRulesInvalid, match=r"safety\.toml: line 3: nested too deeply"):
        read_safety(file)


def test_a_json_file_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n"a": ' + "[" * 200_000)

    with pytest.raises(CheckpointInvalid, match=r"line 2: nested too deeply"):
        read_json(file)


def keys(size: int) -> str:
    return "models:\n" + "".join(
        f"  m{number}: {{directory: /x}}\n" for number in range(size // 25)
    )


FILES: dict[str, Callable[[int], str]] = {
    "many keys": keys,
    "unknown keys": lambda size: "".join(f"model{number}: 1\n" for number in range(size // 12)),
    "repeated key": lambda size: "models: {}\n" * (size // 11),
    "long key": lambda size: "m" * size + ": 1\n",
    "long text": lambda size: "models: " + "x" * size,
    "long number": lambda size: "models: " + "1" * size,
    "lists": lambda size: "models: [" + "[]," * (size // 3) + "]",
    "wrong aliases": lambda size: (
        keys(size // 2)
        + "aliases:\n"
        + "".join(f"  a{number}: n{number}\n" for number in range(size // 30))
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", FILES)
def test_time_grows_with_the_size_of_a_file(kind: str, reader: str) -> None:
    read, write = READERS[reader], FILES[kind]

    def prepare(size: int) -> Call:
        content = write(size)
        return lambda: read(content)

    with as_in_service():
        check_growth(f"{reader}, {kind}", prepare, 8_000)
        check_cost(f"{reader}, {kind}", prepare(8_000), 2.0)


@pytest.mark.parametrize(
    "unit", ['[[rule]]\nname = "a"\n', 'a = "x"\n', "a.a.a.a.a.a = 1\n", "# x\n"]
)
def test_time_grows_with_the_size_of_a_safety_file(unit: str, tmp_path: Path) -> None:
    def prepare(size: int) -> Call:
        file = tmp_path / f"{size}.toml"
        file.write_text(unit * (size // len(unit)))
        return lambda: read_safety(file)

    with as_in_service():
        check_growth(f"safety, {unit}", prepare, 20_000)
