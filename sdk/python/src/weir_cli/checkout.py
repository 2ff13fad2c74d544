"""Version of a checkout, which the tags of its repository give: see docs/releasing.md.

The installed metadata of a checkout says 0.0.0, and would be stale after the next commit, so git
is asked. Only `weir --version` and the build of packages do that.
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

FIRST_RELEASE = "0.1.0"
DESCRIBED = re.compile(r"v(\d+)\.(\d+)\.(\d+)-(\d+)-g[0-9a-f]+")


def installed_version() -> str:
    """Return the version of the installed client, or that of the checkout which it is.

    A checkout adds its commit, and whether files differ from it: `0.2.1.dev5+g982fb3a0.changed`.
    """
    installed = distribution("weir-client")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return installed.version
    root = Path(unquote(urlsplit(origin["url"]).path))
    try:
        commit = output(root, "describe", "--always", "--exclude=*", "--dirty=.changed")
        return f"{version(root)}+g{commit}"
    except (OSError, subprocess.CalledProcessError):  # without git, or without its repository
        return installed.version


def version(root: Path) -> str:
    """Return the version of the commit that is checked out."""
    tag = ("describe", "--tags", "--long", "--match", "v[0-9]*")
    described = subprocess.run(git(root, *tag), capture_output=True, text=True)
    return version_of(described.stdout.strip(), int(output(root, "rev-list", "--count", "HEAD")))


def version_of(described: str, commit_count: int) -> str:
    """Return the version of a commit.

    `described` is the output of `git describe --long`, empty before the first tag.
    """
    if not described:
        return f"{FIRST_RELEASE}.dev{commit_count}"
    found = DESCRIBED.fullmatch(described)
    if found is None:
        raise SystemExit(f"a tag of a release is named like v0.2.0, got {described}")
    major, minor, patch, since = map(int, found.groups())
    if since == 0:
        return f"{major}.{minor}.{patch}"
    return f"{major}.{minor}.{patch + 1}.dev{since}"


def output(root: Path, *arguments: str) -> str:
    """Run git and return its output."""
    return subprocess.run(
        git(root, *arguments), check=True, capture_output=True, text=True
    ).stdout.strip()


def git(root: Path, *arguments: str) -> list[str]:
    """Return a command line of git on the repository `root`."""
    return ["git", "-C", str(root), *arguments]
