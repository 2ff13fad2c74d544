"""Check commit messages: `python -m infra.check_commits [RANGE]`. CONTRIBUTING.md has the rules.

Without RANGE, checks the commits since the newest tag that are not on the default branch yet. In a
clone that has none of these and not START either, such as a shallow one, checks the last commit
only. Skips START and its ancestors, merges, imports without a parent, and commits of bots.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = "84d379edd1ba38e4d0daac7df469f5610fcda03e"  # the last commit that is older than these rules
SUBJECT_CHARS_MAX = 72  # fits a terminal of 80 columns beside the id in `git log --oneline`
LINES_WITHOUT_BODY_MAX = 20  # lines added and removed; a larger change needs its reason

FIRST_WORD = re.compile(r"([A-Z][a-z]+(?:-[a-z]+)*),? \S")
NOT_A_VERB = re.compile(
    "An?|The|This|That|These|Those|What|Who|Whoever|How|When|Where|Why|All|Both|Every|Each|Some|One|No|More|New|For|Of"
)
OTHER_FORM = re.compile(
    r"\w*[aeiouy]\w*ing|\w+[^e]ed|\w+[^s]s|\w{2,}(tion|sion|ment|ness|ity|ance|ence)"
)
IMPERATIVE_WITH_ENDING = re.compile(
    "Embed|Shed|Shred|Alias|Bias|Focus|Harness|Mention|Partition|Position|Condition|Question|Transition|Provision|Version"
    "|Comment|Document|Implement|Increment|Decrement|Instrument|Experiment|Augment|Segment|Fragment"
    "|Advance|Balance|Enhance|Reference|Sequence|Silence"
)
TRAILER = re.compile(r"[A-Z][A-Za-z-]+: ")


def complaints(message: str, changed_line_count: int) -> Iterator[str]:
    """Yield the faults of a message. `changed_line_count` counts lines added and removed."""
    subject, *rest = message.strip().splitlines() or [""]
    if len(subject) > SUBJECT_CHARS_MAX:
        yield (
            f"the subject has {len(subject)} characters, and at most {SUBJECT_CHARS_MAX} are"
            " allowed"
        )
    if subject.endswith("."):
        yield "the subject ends with a full stop: remove it"
    if not begins_with_imperative(subject):
        yield "the subject must begin with a verb in the imperative, as in 'Reject an empty prompt'"
    if rest and rest[0].strip():
        yield "the second line must be empty: it separates the subject from the body"
    has_body = any(line.strip() and not TRAILER.match(line) for line in rest)
    if changed_line_count > LINES_WITHOUT_BODY_MAX and not has_body:
        yield (
            f"the commit changes {changed_line_count} lines and has no body: say why the change is"
            " made"
        )


def begins_with_imperative(subject: str) -> bool:
    """Return whether the first word can be an imperative. Articles and plurals cannot."""
    found = FIRST_WORD.match(subject)
    if found is None or NOT_A_VERB.fullmatch(found[1]):
        return False
    return bool(IMPERATIVE_WITH_ENDING.fullmatch(found[1]) or not OTHER_FORM.fullmatch(found[1]))


def git(repository: Path, *arguments: str) -> str:
    """Run a git command and return its output. Raises CalledProcessError if it fails."""
    command = ["git", "-C", str(repository), *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, encoding="utf-8", errors="replace"
    )
    return done.stdout.strip()


def succeeds(repository: Path, *arguments: str) -> bool:
    """Return whether a git command exits with status 0."""
    return (
        subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True).returncode
        == 0
    )


def bases(repository: Path, start: str = START) -> list[str]:
    """List the revisions whose history is not checked, of those that this clone has."""
    found = [start] if succeeds(repository, "cat-file", "-e", f"{start}^{{commit}}") else []
    newest_tag = ("describe", "--tags", "--abbrev=0")
    if succeeds(repository, *newest_tag):
        found.append(git(repository, *newest_tag))
    for branch in ("origin/HEAD", "origin/main", "main"):
        if succeeds(repository, "rev-parse", "--verify", branch):
            if not succeeds(repository, "merge-base", "--is-ancestor", "HEAD", branch):
                found.append(branch)
            break
    return found


def selected(repository: Path, commit_range: str | None, start: str = START) -> list[str]:
    """List the ids of the commits to check, newest first.

    Raises: CalledProcessError if git does not know `commit_range`.
    """
    excluded = [
        f"^{base}" for base in bases(repository, start) if commit_range is None or base == start
    ]
    limit = [] if commit_range or excluded else ["--max-count=1"]
    return git(repository, "rev-list", *limit, commit_range or "HEAD", *excluded, "--").split()


def findings(repository: Path, commit: str) -> Iterator[str]:
    """Yield the faults of one commit, unless it is of a kind that is not checked."""
    header, _, message = git(repository, "cat-file", "commit", commit).partition("\n\n")
    # The object names all parents; `git log` hides those beyond the end of a shallow clone.
    if len(re.findall("^parent ", header, re.MULTILINE)) != 1 or re.search(
        r"^author .*\[bot\]", header, re.MULTILINE
    ):
        return
    changed = re.findall(
        r"(\d+) (?:insertion|deletion)", git(repository, "diff-tree", "--shortstat", commit)
    )
    subject = message.partition("\n")[0]
    for complaint in complaints(message, sum(map(int, changed))):
        yield f"{commit[:10]} {subject!r}: {complaint}"


def check(repository: Path, commit_range: str | None = None, start: str = START) -> Iterator[str]:
    """Yield the findings of all commits to check. Raises CalledProcessError like `selected`."""
    for commit in selected(repository, commit_range, start):
        yield from findings(repository, commit)


def main() -> int:
    """Print the findings; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "range",
        nargs="?",
        metavar="RANGE",
        help="commits to check, as `git log` takes them: v0.1.0..HEAD",
    )
    options = parser.parse_args()
    if options.range is None and not bases(ROOT):
        print("This clone has no base to count from: only the last commit is checked.")
    try:
        found = list(check(ROOT, options.range))
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip(), file=sys.stderr)
        return 2
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
