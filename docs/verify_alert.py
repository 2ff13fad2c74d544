"""Verifies one alert that Weir has posted to a webhook, with Python's standard library alone.

In your handler: `verify(secret, request.headers["Weir-Signature"], request.body)`, with the body as it came, before any parsing.
From the shell, for trying it out: python verify_alert.py SECRET SIGNATURE < body
"""

import hashlib
import hmac
import sys
import time

TOLERANCE_S = 300  # what is older was sent again by somebody else


def verify(secret: str, header: str, body: bytes, now_s: float | None = None) -> bool:
    parts = dict(part.partition("=")[::2] for part in header.split(","))
    sent_s = parts.get("t", "")
    if not sent_s.isdecimal() or len(sent_s) > 20 or abs((time.time() if now_s is None else now_s) - int(sent_s)) > TOLERANCE_S:
        return False
    expected = hmac.new(secret.encode(), sent_s.encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), parts.get("v1", "").encode(errors="replace"))


if __name__ == "__main__":
    good = verify(sys.argv[1], sys.argv[2], sys.stdin.buffer.read())
    print("the signature is good" if good else "the signature is wrong, or too old")
    sys.exit(0 if good else 1)
