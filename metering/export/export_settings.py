"""Settings of the export, from the environment: where usage goes, and how Stripe is reached. Secrets never show in a repr.

`STRIPE_API_KEY` and `WEIR_STRIPE_WEBHOOK_SECRET` may be given as a file instead, with `_FILE` behind the name.
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
DAYS_UNTIL_DUE = 30
Choice = TypeVar("Choice", bound=StrEnum)


class Destination(StrEnum):
    """Where usage is exported to."""

    OFF = "off"
    FILE = "file"
    STRIPE = "stripe"


class Collection(StrEnum):
    """How Stripe collects: it sends invoices to be paid, or charges the customer's payment method."""

    SEND_INVOICE = "send_invoice"
    CHARGE = "charge_automatically"


class Finalizing(StrEnum):
    """When an invoice at Stripe becomes final: once our month is closed, or by Stripe itself an hour after the month."""

    CLOSE = "close"
    STRIPE = "stripe"


@dataclass(frozen=True, slots=True)
class StripeSettings:
    """namespace: prefix of all that we create at Stripe, so that two installations can share an account."""

    api_key: str = field(repr=False)
    namespace: str = "weir"
    collection: Collection = Collection.SEND_INVOICE
    api_base: str = "https://api.stripe.com"
    finalizing: Finalizing = Finalizing.CLOSE

    @property
    def finalizes(self) -> bool:
        """Whether drafts are held until their month is closed, and finalised then."""
        return self.finalizing is Finalizing.CLOSE

    @property
    def account(self) -> str:
        """`test` or `live`, by the key."""
        return self.api_key.split("_")[1]


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What `WEIR_EXPORT` and its companions say."""

    destination: Destination
    file: Path
    stripe: StripeSettings | None


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Where Stripe's events are taken, and the secrets that they may be signed with: one for each destination set up there."""

    secrets: tuple[str, ...] = field(repr=False)
    listen_host: str = "127.0.0.1"
    listen_port: int = WEBHOOK_PORT


def export_settings(environment: Mapping[str, str]) -> ExportSettings:
    """Raises: InvalidValue naming the variable."""
    destination = choice(environment, "WEIR_EXPORT", Destination.OFF)
    home = Path(environment.get("WEIR_HOME") or Path.home() / ".weir")
    file = Path(environment.get("WEIR_EXPORT_FILE") or home / "usage.jsonl").expanduser()
    return ExportSettings(destination, file, stripe_settings(environment) if destination is Destination.STRIPE else None)


def stripe_settings(environment: Mapping[str, str]) -> StripeSettings:
    """Raises: InvalidValue naming the variable; never with the key in it."""
    key = secret(environment, "STRIPE_API_KEY")
    if not KEY_FORM.fullmatch(key):
        raise InvalidValue("STRIPE_API_KEY", "give a secret or restricted key (sk_… or rk_…), or its file as STRIPE_API_KEY_FILE")
    namespace = environment.get("WEIR_STRIPE_NAMESPACE") or "weir"
    if not NAMESPACE_FORM.fullmatch(namespace):
        raise InvalidValue("WEIR_STRIPE_NAMESPACE", "give 1 to 20 small letters and digits, starting with a letter")
    collection = choice(environment, "WEIR_STRIPE_COLLECTION", Collection.SEND_INVOICE)
    base = (environment.get("WEIR_STRIPE_API_BASE") or "https://api.stripe.com").rstrip("/")
    if not base.startswith("https://") and not LOCAL_BASE_FORM.fullmatch(base):
        raise InvalidValue("WEIR_STRIPE_API_BASE", "give an https URL: the key would travel in the clear")
    return StripeSettings(key, namespace, collection, base, choice(environment, "WEIR_STRIPE_FINALIZE", Finalizing.CLOSE))


def webhook_settings(environment: Mapping[str, str]) -> WebhookSettings | None:
    """None where no secret is set: events are not taken then. Raises: InvalidValue."""
    if not (found := tuple(secret(environment, "WEIR_STRIPE_WEBHOOK_SECRET").replace(",", " ").split())):
        return None
    host, colon, port = (environment.get("WEIR_STRIPE_WEBHOOK_LISTEN") or f"127.0.0.1:{WEBHOOK_PORT}").rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidValue("WEIR_STRIPE_WEBHOOK_LISTEN", "give ADDRESS:PORT")
    return WebhookSettings(found, host.strip("[]"), int(port))


def choice(environment: Mapping[str, str], name: str, default: Choice) -> Choice:
    """One of the values of an enumeration. Raises: InvalidValue."""
    word = environment.get(name) or default
    if word not in set(type(default)):
        raise InvalidValue(name, f"{word!r} is not known: give {' or '.join(type(default))}")
    return type(default)(word)


def secret(environment: Mapping[str, str], name: str) -> str:
    """A secret by its variable or by the file that `<name>_FILE` names; empty if neither is set. Raises: InvalidValue."""
    if value := environment.get(name):
        return value.strip()
    if not (path := environment.get(f"{name}_FILE")):
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{name}_FILE", f"{path} cannot be read: {type(error).__name__}") from error
