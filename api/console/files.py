"""The page's own files, read once at the start, and the headers that keep a browser to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

STATIC = Path(__file__).resolve().parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),  # text can never become markup or code
    )
)
# On every answer of the console, whatever it is.
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. etag: of its bytes, as the header has it."""

    content: bytes
    media_type: str
    etag: str

    def answer(self, request: web.BaseRequest) -> web.Response:
        """The file, or that the browser has it already."""
        headers = {**HEADERS, "cache-control": "no-cache", "etag": self.etag, "content-type": self.media_type}
        if any(each.value == self.etag.strip('"') or each.value == "*" for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.content, headers=headers)


def read_files(directory: Path = STATIC) -> dict[str, PageFile]:
    """By name; `""` is the page itself."""
    found = {path.name: page_file(path) for path in sorted(directory.iterdir()) if path.suffix in MEDIA_TYPES}
    return found | {"": found["index.html"]}


def page_file(path: Path) -> PageFile:
    """A file with its type and digest."""
    content = path.read_bytes()
    return PageFile(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
