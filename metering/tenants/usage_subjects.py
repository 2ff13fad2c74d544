"""Names of usage subjects: the end users of a customer, and the values of its labels.

The customer chooses the name of an end user. It stands in one row (`UsageSubject`), so that
erasing it there erases it everywhere.
"""

from __future__ import annotations

import re
import unicodedata

from metering.core.errors import InvalidValue

NAME_BYTES_MAX = 256
# Weir's keys, keys of OpenAI's form, and JSON Web Tokens: reports show names to users who must not
# see a secret.
SECRET_FORMS = re.compile(
    r"wk_[a-z0-9]{6,}_[0-9A-Za-z]{16,}"
    r"|\bsk-[0-9A-Za-z_-]{20,}"
    r"|\beyJ[0-9A-Za-z_-]{8,}\.[0-9A-Za-z_-]{8,}\.[0-9A-Za-z_-]*"
)


def checked_end_user(name: str, field: str = "end_user") -> str:
    """Validate an end user's name and return it; empty if none was given. Raises: InvalidValue.

    `field` is the name of the field in the request, for the message. The name itself is not
    repeated there.
    """
    if not name:
        return name
    try:
        byte_count = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidValue(field, "must be valid Unicode text") from None
    if byte_count > NAME_BYTES_MAX:
        raise InvalidValue(
            field,
            f"must have 1 to {NAME_BYTES_MAX} bytes in UTF-8, got {byte_count}: send an id of your"
            " user, not data about it",
        )
    if name != name.strip():
        raise InvalidValue(field, "must not begin or end with a blank: remove it")
    if not name.isascii() or not name.isprintable():
        for at, character in enumerate(name):
            # Control characters, line separators, and code points without a meaning of their own.
            if unicodedata.category(character) in ("Cc", "Cn", "Cs", "Zl", "Zp"):
                raise InvalidValue(
                    field,
                    f"must not contain control characters, got U+{ord(character):04X} at"
                    f" position {at}",
                )
    if SECRET_FORMS.search(name):
        raise InvalidValue(
            field,
            "looks like an API key or token: send an id of your user, and revoke the secret if it"
            " was one",
        )
    return name
