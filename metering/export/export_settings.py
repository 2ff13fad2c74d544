"""Settings of the export, from the environment: destination and access to Stripe. Secrets are left
out of reprs.

A file may hold `STRIPE_API_KEY` or `WEIR_STRIPE_WEBHOOK_SECRET`: name it with `_FILE` appended to
the variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from metering.core.errors import InvalidValue

NAMESPACE_FORM = re.compile(r"[a-z][a-z0-9]{0,19}", re.ASCII)
KEY_FORM = re.compile(r"(sk|rk)_(test|live)_\w+", re.ASCII)
LOCAL_BASE_FORM = re.compile(r"http://(127\.0\.0\.1|localhost)(:\d+)?", re.ASCII)
WEBHOOK_PORT = 8377
# Variables of secrets: of the worker and of `weir stripe`, and of the endpoint for events.
STRIPE_SECRETS, WEBHOOK_SECRETS = (
    (name, f"{name}_FILE") for name in ("STRIPE_API_KEY", "WEIR_STRIPE_WEBHOOK_SECRET")
)
DAYS_UNTIL_DUE = 30
Choice = TypeVar("Choice", bound=StrEnum)


class Destination(StrEnum):
    """Destination of exported usage."""

    OFF = "off"
    FILE = "file"
    STRIPE = "stripe"


class Collection(StrEnum):
    """Collection method at Stripe: send invoices, or charge the customer's payment method."""

    SEND_INVOICE = "send_invoice"
    CHARGE = "charge_automatically"


class Finalizing(StrEnum):
    """Trigger that finalizes Stripe's invoices: our close, or one hour after the month ends."""

    CLOSE = "close"
    STRIPE = "stripe"


@dataclass(frozen=True, slots=True)
class StripeSettings:
    """Settings of the export to Stripe. `namespace` is the prefix of all objects created there."""

    api_key: str = field(repr=False)
    namespace: str = "weir"
    collection: Collection = Collection.SEND_INVOICE
    api_base: str = "https://api.stripe.com"
    finalizing: Finalizing = Finalizing.CLOSE

    @property
    def finalizes(self) -> bool:
        """True if Weir holds Stripe's drafts until it closes the month, and then finalizes them."""
        return self.finalizing is Finalizing.CLOSE

    @property
    def account(self) -> str:
        """Mode of the API key: `test` or `live`."""
        return self.api_key.split("_")[1]


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Settings of the export. `stripe` is None unless the destination is Stripe."""

    destination: Destination
    file: Path
    stripe: StripeSettings | None


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Settings of the listener for Stripe's events; `secrets` has a signing secret per endpoint."""

    secrets: tuple[str, ...] = field(repr=False)
    listen_host: str = "127.0.0.1"
    listen_port: int = WEBHOOK_PORT


def export_settings(environment: Mapping[str, str]) -> ExportSettings:
    """Read the export's settings from environment variables.

    Raises: InvalidValue with the name of the invalid variable.
    """
    destination = choice(environment, "WEIR_EXPORT", Destination.OFF)
    home = Path(environment.get("WEIR_HOME") or Path.home() / ".weir")
    file = Path(environment.get("WEIR_EXPORT_FILE") or home / "usage.jsonl").expanduser()
    return ExportSettings(
        destination,
        file,
        stripe_settings(environment) if destination is Destination.STRIPE else None,
    )


def stripe_settings(environment: Mapping[str, str]) -> StripeSettings:
    """Read Stripe's settings from environment variables.

    Raises: InvalidValue with the name of the invalid variable.
    """
    key = secret(environment, "STRIPE_API_KEY")
    if not KEY_FORM.fullmatch(key):
        raise InvalidValue(
            "STRIPE_API_KEY",
            "must be a secret or restricted key (sk_… or rk_…), or set STRIPE_API_KEY_FILE",
        )
    namespace = environment.get("WEIR_STRIPE_NAMESPACE") or "weir"
    if not NAMESPACE_FORM.fullmatch(namespace):
        raise InvalidValue(
            "WEIR_STRIPE_NAMESPACE",
            "must be 1 to 20 lower-case letters and digits, starting with a letter",
        )
    collection = choice(environment, "WEIR_STRIPE_COLLECTION", Collection.SEND_INVOICE)
    base = (environment.get("WEIR_STRIPE_API_BASE") or "https://api.stripe.com").rstrip("/")
    if not base.startswith("https://") and not LOCAL_BASE_FORM.fullmatch(base):
        raise InvalidValue(
            "WEIR_STRIPE_API_BASE", "must be an https URL: otherwise the key is sent in clear text"
        )
    return StripeSettings(
        key,
        namespace,
        collection,
        base,
        choice(environment, "WEIR_STRIPE_FINALIZE", Finalizing.CLOSE),
    )


def webhook_settings(environment: Mapping[str, str]) -> WebhookSettings | None:
    """Read the settings of the listener for Stripe's events; None if no signing secret is set.

    Raises: InvalidValue with the name of the invalid variable.
    """
    if not (
        secrets := tuple(
            secret(environment, "WEIR_STRIPE_WEBHOOK_SECRET").replace(",", " ").split()
        )
    ):
        return None
    host, colon, port = (
        environment.get("WEIR_STRIPE_WEBHOOK_LISTEN") or f"127.0.0.1:{WEBHOOK_PORT}"
    ).rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidValue("WEIR_STRIPE_WEBHOOK_LISTEN", "must have the form ADDRESS:PORT")
    return WebhookSettings(secrets, host.strip("[]"), int(port))


def choice(environment: Mapping[str, str], name: str, default: Choice) -> Choice:
    """Read a variable as a member of the enumeration of `default`. Raises: InvalidValue."""
    word = environment.get(name) or default
    if word not in set(type(default)):
        raise InvalidValue(name, f"must be {' or '.join(type(default))}, got {word!r}")
    return type(default)(word)


def secret(environment: Mapping[str, str], name: str) -> str:
    """Read a secret from the variable `name` or the file that `<name>_FILE` names; empty if unset.

    Raises: InvalidValue if the file cannot be read.
    """
    if value := environment.get(name):
        return value.strip()
    if not (path := environment.get(f"{name}_FILE")):
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(
            f"{name}_FILE",
            f"{path} cannot be read ({type(error).__name__}): check the path and its mode",
        ) from error
