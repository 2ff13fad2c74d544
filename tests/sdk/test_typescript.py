"""The TypeScript client: it compiles under its strict rules, and keeps each promise of `sdk/conformance.json`.

Its own tests run in Node against a real server; each of them is one test here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import typescript_sdk
from metering.models import QuotaDimension
from tests.conftest import new_database
from tests.inference.encoder_checkpoints import make_random_encoder
from tests.sdk.test_conformance import ENCODER, price_encoder, tight_service
from tests.service import MODEL, Service, make_model, running, wait_for

CONFORMANCE = json.loads((typescript_sdk.SDK.parent / "conformance.json").read_text())
PROMISES = [each["id"] for each in CONFORMANCE]


@pytest.fixture(scope="module")
def built() -> None:
    """The client, compiled."""
    if (why := typescript_sdk.missing()) is not None:
        if os.environ.get("WEIR_REQUIRE_NODE"):
            pytest.fail(why)
        pytest.skip(why)
    typescript_sdk.build()


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, template_database: str, built: None
) -> Iterator[Service]:
    """A server of its own."""
    model = make_model(tmp_path_factory.mktemp("model"))
    with new_database(postgres_server, template=template_database) as url:
        encoders = {ENCODER: make_random_encoder(tmp_path_factory.mktemp("encoder"))}
        with running(Service(tmp_path_factory.mktemp("home"), url, model, encoders=encoders)) as service:
            wait_for(lambda: service.serving(f"engine/{ENCODER}"), "the encoder to be loaded")
            yield service
            assert service.stop() == 0, service.log[-4000:]
        assert service.books.held_hold_count() == 0


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Service]:
    """A second server, which keeps little, and for a short time."""
    with running(tight_service(tmp_path_factory.mktemp("tight"), service)) as tight:
        yield tight


@pytest.fixture(scope="module")
def report(service: Service, tight: Service) -> dict[str, str]:
    """What Node said of each of its tests: "ok", or why not."""
    tenant = asyncio.run(service.tenant())
    limited = asyncio.run(service.tenant({QuotaDimension.TOKENS_PER_MONTH: 40}))
    asyncio.run(price_encoder(service))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    environment |= {
        "WEIR_ADDRESS": service.address,
        "WEIR_API_KEY": tenant.secret,
        "WEIR_TEST_LIMITED_KEY": limited.secret,
        "WEIR_TEST_TIGHT_ADDRESS": tight.address,
        "WEIR_TEST_MODEL": MODEL,
        "WEIR_TEST_ENCODER": ENCODER,
    }
    tests = sorted(str(path) for path in (typescript_sdk.SDK / "dist" / "tests").glob("*.test.js"))
    done = subprocess.run(
        ["node", "--test", "--test-reporter=tap", *tests], env=environment, capture_output=True, text=True, timeout=300
    )
    found = re.findall(r"^(?:    )*(ok|not ok) \d+ - (.+?)\n(.*?)(?=^(?:    )*(?:ok|not ok|#|1\.\.))", done.stdout, re.M | re.S)
    return {name: "ok" if verdict == "ok" else said for verdict, name, said in found}


@pytest.mark.parametrize("promise", PROMISES)
def test_the_typescript_client_keeps(promise: str, report: dict[str, str]) -> None:
    said = report.get(promise, "no such test in sdk/typescript/tests")
    if said != "ok":
        pytest.fail(said, pytrace=False)


def test_every_test_of_the_typescript_client_is_a_promise(report: dict[str, str]) -> None:
    assert {name for name in report if not Path(name).suffix} == set(PROMISES)
