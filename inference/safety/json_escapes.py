r"""JSON's escapes in text that comes in pieces: `\u0074` is a `t` for whoever parses it."""

from __future__ import annotations

import re

# An escape, two that are one character, and at the end of the text what may become one.
_ESCAPE = re.compile(
    r"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<part>(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?\Z)"
    r"|u(?P<unit>[0-9a-fA-F]{4})"
    r"|(?P<short>[\"\\/bfnrt]))"
)
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NO_CHARACTER = "\ufffd"  # for half a pair of surrogates, which no classifier's tokenizer takes


class Unescaper:
    """Reads the escapes of JSON in text that comes in pieces. All else stays as it is, also what is no JSON."""

    def __init__(self) -> None:
        self.pending = ""  # the beginning of an escape, which is not read yet

    def push(self, text: str) -> str:
        """More text; what of it can be read now."""
        text, self.pending = self.pending + text, ""
        return _ESCAPE.sub(self._read, text)

    def _read(self, found: re.Match[str]) -> str:
        if found["part"] is not None:
            self.pending = found[0]
            return ""
        if found["high"] is not None:
            high, low = int(found["high"], 16), int(found["low"], 16)
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
        if found["unit"] is not None:
            unit = int(found["unit"], 16)
            return _NO_CHARACTER if 0xD800 <= unit <= 0xDFFF else chr(unit)
        return _SHORT[found["short"]]
