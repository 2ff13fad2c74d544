"""The check of commit messages: good and bad messages, and which commits it reads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from infra.check_commits import START, check, complaints, main, selected

GOOD = (
    "Reject control characters in model names",
    "Embed texts of several models in one batch",
    "Feed the scheduler from one queue",
    "Process messages of a stream in order",
    "Document the release procedure",
    "Close, verify and correct months",
    "Re-enable the health check of workers",
    'Revert "Reject control characters in model names"',
    "Reject control characters in model names\n\nThey break the columns of `weir models`.",
    "X" + "a" * 68 + " it",
)
BAD = {
    "": "must begin with a verb",
    "reject control characters": "must begin with a verb",
    "fix: reject control characters": "must begin with a verb",
    "Console: reject control characters": "must begin with a verb",
    "Tests, docs and a fix": "must begin with a verb",
    "Documentation and tests": "must begin with a verb",
    "A test of control characters": "must begin with a verb",
    "Rejected control characters": "must begin with a verb",
    "Rejecting control characters": "must begin with a verb",
    "Rejects control characters": "must begin with a verb",
    "Fix": "must begin with a verb",
    "Reject control characters.": "ends with a full stop",
    "X" + "a" * 69 + " it": "has 73 characters, and at most 72",
    "Reject control characters\nin model names": "second line must be empty",
}


@pytest.mark.parametrize("message", GOOD)
def test_a_good_message_has_no_complaint(message: str) -> None:
    assert list(complaints(message, changed_line_count=20)) == []


@pytest.mark.parametrize(("message", "words"), BAD.items())
def test_a_bad_message_gets_the_reason(message: str, words: str) -> None:
    [complaint] = complaints(message, changed_line_count=1)

    assert words in complaint


@pytest.mark.parametrize("body", ["", "\n\nSigned-off-by: Ann <ann@example.com>"])
def test_a_large_change_needs_a_body(body: str) -> None:
    [complaint] = complaints(f"Reject control characters{body}", changed_line_count=21)

    assert complaint.startswith("the commit changes 21 lines and has no body")
    assert (
        list(complaints("Reject control characters\n\nThey break columns.", changed_line_count=21))
        == []
    )


class Repository:
    """Git repository on the branch main, with one commit that is older than the rules."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.start = self.commit("first")

    def git(self, *arguments: str, author: str = "Ann") -> str:
        isolated = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        for role in ("AUTHOR", "COMMITTER"):
            isolated |= {f"GIT_{role}_NAME": author, f"GIT_{role}_EMAIL": "ann@example.com"}
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | isolated
        ).stdout.strip()

    def commit(self, message: str, line_count: int = 1, author: str = "Ann") -> str:
        """Commit a change that adds `line_count` lines; return the commit's id."""
        with (self.root / "file").open("a") as file:
            file.write("line\n" * line_count)
        self.git("add", "file")
        self.git("commit", "--quiet", f"--message={message}", author=author)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_commits_since_the_start_are_checked(repository: Repository) -> None:
    bad = repository.commit("second", line_count=30)
    repository.commit("Reject control characters")

    message = list(check(repository.root, start=repository.start))

    assert [line.partition(": ")[0] for line in message] == [f"{bad[:10]} 'second'"] * 2
    assert "changes 30 lines and has no body" in message[1]


def test_commits_up_to_the_start_are_never_checked(repository: Repository) -> None:
    start = repository.commit("second")

    assert list(check(repository.root, start=start)) == []
    assert list(check(repository.root, "HEAD", start)) == []
    repository.git("checkout", "--quiet", "HEAD~")
    assert list(check(repository.root, start=start)) == []


def test_commits_up_to_the_newest_tag_are_not_checked_again(repository: Repository) -> None:
    tagged = repository.commit("second")
    repository.git("tag", "v0.1.0")
    newest = repository.commit("third")

    assert selected(repository.root, None, repository.start) == [newest]
    assert selected(repository.root, "HEAD", repository.start) == [newest, tagged]


def test_a_branch_is_checked_from_where_it_left_the_default_branch(repository: Repository) -> None:
    repository.commit("second")
    repository.git("checkout", "--quiet", "-b", "change")
    own = repository.commit("third")

    assert selected(repository.root, None, repository.start) == [own]


def test_merges_and_commits_of_bots_are_not_checked(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "change")
    repository.commit("bump things", author="dependabot[bot]")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "--message=merge it", "change")

    assert len(selected(repository.root, None, repository.start)) == 2
    assert list(check(repository.root, start=repository.start)) == []


def test_an_import_of_the_whole_tree_is_not_checked(tmp_path: Path) -> None:
    imported = Repository(tmp_path / "imported")

    assert selected(imported.root, None, START) == [imported.start]
    assert list(check(imported.root)) == []


def test_of_a_shallow_clone_the_last_one_is_checked(repository: Repository, tmp_path: Path) -> None:
    repository.commit("second")
    last = repository.commit("third", line_count=30)
    repository.git(
        "clone",
        "--quiet",
        "--no-local",
        "--depth=1",
        str(repository.root),
        str(tmp_path / "shallow"),
    )

    [complaint] = check(tmp_path / "shallow", start=repository.start)

    assert complaint.startswith(f"{last[:10]} 'third': the subject must begin")


def test_a_history_without_the_start_is_checked_from_its_tag(repository: Repository) -> None:
    repository.git("tag", "v0.1.0")
    commits = [repository.commit("second"), repository.commit("third")]

    assert selected(repository.root, None, start="0" * 40) == commits[::-1]


def test_it_reports_that_only_the_last_commit_is_checked(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit("Reject control characters")
    monkeypatch.setattr("infra.check_commits.ROOT", repository.root)
    monkeypatch.setattr("sys.argv", ["check_commits"])

    assert main() == 0
    assert capsys.readouterr().out.endswith("only the last commit is checked.\n")


def test_an_unknown_range_is_a_separate_error(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("infra.check_commits.ROOT", repository.root)
    monkeypatch.setattr("sys.argv", ["check_commits", "v9..HEAD"])

    assert main() == 2
    assert "v9..HEAD" in capsys.readouterr().err
