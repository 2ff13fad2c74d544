"""Stripe's HTTP API as a server on this machine, for tests: the real SDK connects to it.

Faults are set beforehand: each in `faults` is used by one meter event's call. Like Stripe for a
day, the double repeats the first answer for an idempotency key, also a server error.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.stripe_double.account import Account
from tests.stripe_double.form import Refused, operation_of, parsed

KEY = "sk_test_double"
SECRET = "whsec_double"


@dataclass(slots=True)
class Fault:
    """Fault in one call for a meter event.

    accepted: whether the event is counted before. status: of the answer; 0 drops the connection.
    wait: an event that delays the answer.
    """

    accepted: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None


@dataclass(slots=True)
class StripeDouble:
    """Server double. calls: by operation; clashes: concurrent calls for one meter."""

    url: str
    account: Account
    faults: deque[Fault] = field(default_factory=deque)
    calls: Counter[str] = field(default_factory=Counter)
    clashes: int = 0
    # A fault that waits has begun.
    reached: threading.Event = field(default_factory=threading.Event)
    bad_key: bool = False
    lose_cancellations: int = 0  # lost answers to cancellations
    lose_items: int = 0  # lost answers to invoice items
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a worker that exports to it."""
        return {"WEIR_EXPORT": "stripe", "STRIPE_API_KEY": KEY, "WEIR_STRIPE_API_BASE": self.url}

    def answer(
        self, method: str, path: str, form: str, key: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Return status, body and headers; status 0 for no answer."""
        if self.bad_key:
            return (
                401,
                {
                    "error": {
                        "type": "invalid_request_error",
                        "message": "Invalid API Key provided: sk_test_****uble",
                    }
                },
                {},
            )
        try:
            if method == "GET" and path.startswith("/v2/core/events/"):
                return 200, self.account.reports[path.rpartition("/")[2]], {}
            operation, indexes = operation_of(method, path)
            values = parsed(operation, form)
            self.calls[operation] += 1
            if operation == "POST /v1/billing/meter_events":
                return self.meter_event(values, key)
            with self.lock:
                if key and key in self.answered:
                    return *self.answered[key], {}
                made = self.account.run(operation, indexes, values)
                if key:
                    self.answered[key] = 200, made
                if (
                    operation == "POST /v1/billing/meter_event_adjustments"
                    and self.lose_cancellations
                ):
                    self.lose_cancellations -= 1
                    return 0, {}, {}
                if operation == "POST /v1/invoiceitems" and self.lose_items:
                    self.lose_items -= 1
                    return 0, {}, {}
            return 200, made, {}
        except Refused as refused:
            return refused.status, {"error": refused.error}, {"stripe-should-retry": "false"}

    def meter_event(
        self, values: dict[str, Any], key: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Handle an event, one at a time per customer and meter, with the next fault."""
        index = f"{values['event_name']} {values['payload'].get('stripe_customer_id')}"
        with self.lock:
            if index in self.busy:
                self.clashes += 1
                return (
                    429,
                    {
                        "error": {
                            "type": "invalid_request_error",
                            "code": "lock_timeout",
                            "message": "one at a time",
                        }
                    },
                    {},
                )
            if key in self.answered:
                return *self.answered[key], {}
            self.busy.add(index)
            fault = self.faults.popleft() if self.faults else None
        try:
            if fault is None or fault.accepted:
                with self.lock:
                    made = self.account.run("POST /v1/billing/meter_events", [], values)
            if fault is None:
                self.answered[key] = 200, made
                return 200, made, {}
            if fault.wait is not None:
                self.reached.set()
                fault.wait.wait(60)
            failure = {"error": {"type": "api_error", "message": f"status {fault.status}"}}
            if fault.status >= 500:
                self.answered[key] = fault.status, failure
            return fault.status, failure, fault.headers
        finally:
            with self.lock:
                self.busy.discard(index)


@contextlib.contextmanager
def stripe_double(clock: Callable[[], float] | None = None) -> Iterator[StripeDouble]:
    """Run the server during the block."""
    account = Account() if clock is None else Account(clock)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.handle_call()

        def do_POST(self) -> None:
            self.handle_call()

        def handle_call(self) -> None:
            address = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, document, headers = double.answer(
                self.command,
                address.path,
                body or address.query,
                self.headers.get("Idempotency-Key") or "",
            )
            if not status:
                self.close_connection = True
                self.connection.close()
                return
            payload = json.dumps(document).encode()
            # The caller was killed meanwhile.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                for name, value in {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(payload)),
                    **headers,
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore errors of connections that the test dropped."""

    server = Server(("127.0.0.1", 0), Handler)
    double = StripeDouble(f"http://127.0.0.1:{server.server_address[1]}", account)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def signature(body: bytes, at: int, secret: str = SECRET) -> str:
    """Return the header `Stripe-Signature` of a webhook."""
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"
