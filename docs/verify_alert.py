"""Verify an alert that Weir has posted to a webhook, with Python's standard library alone.

In your handler, call `verify(secret, request.headers["Weir-Signature"], request.body)` with the
body as it was received, before any parsing. To try it in a shell:
python verify_alert.py SECRET SIGNATURE < body

`python verify_alert.py SECRET --listen 8400` receives alerts on this machine and prints them.
"""

import hashlib
import hmac
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

TOLERANCE_S = 300  # an older alert may be a replay


def verify(secret: str, header: str, body: bytes, now_s: float | None = None) -> bool:
    """Return whether the signature is valid and recent. now_s: Unix time in seconds."""
    parts = dict(part.partition("=")[::2] for part in header.split(","))
    sent_s = parts.get("t", "")
    if (
        not sent_s.isdecimal()
        or len(sent_s) > 20
        or abs((time.time() if now_s is None else now_s) - int(sent_s)) > TOLERANCE_S
    ):
        return False
    expected = hmac.new(secret.encode(), sent_s.encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), parts.get("v1", "").encode(errors="replace"))


class Receiver(BaseHTTPRequestHandler):
    """Accepts alerts with a valid signature, and prints their texts."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_valid = verify(sys.argv[1], self.headers.get("Weir-Signature", ""), body)
        self.send_response(204 if is_valid else 401)
        self.end_headers()
        print(json.loads(body)["text"] if is_valid else "refused: wrong signature", flush=True)

    def log_message(self, *_: object) -> None:
        """Print nothing else."""


if __name__ == "__main__":
    if sys.argv[2] == "--listen":
        HTTPServer(("127.0.0.1", int(sys.argv[3])), Receiver).serve_forever()
    is_valid = verify(sys.argv[1], sys.argv[2], sys.stdin.buffer.read())
    print("the signature is valid" if is_valid else "the signature is wrong, or too old")
    sys.exit(0 if is_valid else 1)
