"""Api processes before the same two servers: a prompt goes where its prefix is cached."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from api.core.settings import bundled_models
from inference.adapters.remote_settings import Service as Wire
from inference.kv_blocks import KV_BLOCK_TOKENS
from metering.control.control_channel import BYTES_MAX, PREFIXES
from metering.control.live import CHANNEL, REPORT
from metering.store.db import psycopg_conninfo
from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import ServerProcess, server_process
from tests.service import MODEL, Service, Tenant, until

FLEET = """
regions: {{eu: []}}
models:
  {model}: {{engine: remote, directory: {directory}, targets: {targets}}}
"""
PROMPT_COUNT = 8
PROMPT_TOKENS = 6 * KV_BLOCK_TOKENS + 4
Pair = tuple[Service, Service]


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Yield two servers with prefix caches."""
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with ExitStack() as stack:
        yield [stack.enter_context(server_process(model, certificates)) for _ in range(2)]


@pytest.fixture(scope="module")
def gateway(
    serve: Serve,
    servers: list[ServerProcess],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[], Service]:
    """Return a function that starts a process in front of both servers."""
    file = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    targets = [{"address": str(each.target(Wire.TRTLLM)), "region": "eu"} for each in servers]
    fleet = FLEET.format(model=MODEL, directory=model, targets=json.dumps(targets))
    file.write_text(fleet)

    def gateway() -> Service:
        return serve(model, is_drained=True, models=bundled_models(), fleet=str(file), region="eu")

    return gateway


@pytest.fixture(scope="module")
def gateways(gateway: Callable[[], Service]) -> Pair:
    """Return two processes."""
    return gateway(), gateway()


def prompts(seed: int) -> list[list[int]]:
    """Return prompts without a common prefix."""
    return [
        [7 + (seed * 91 + number * 37 + at * (number + 3)) % 390 for at in range(PROMPT_TOKENS)]
        for number in range(PROMPT_COUNT)
    ]


async def cached_counts(service: Service, tenant: Tenant, requested: list[list[int]]) -> list[int]:
    """Send prompts one after the other; return how many tokens of each the server had cached."""
    found = []
    async with service.stream(tenant.secret) as stream:
        for prompt in requested:
            request_id = await stream.begin(prompt=prompt, max_output_tokens=1)
            end = await stream.finished(request_id)
            found.append(end.usage.cached_input_token_count)
    return found


class Heard:
    """Broadcasts about sent blocks on a database."""

    def __init__(self, database_url: str) -> None:
        self.connection = psycopg.connect(psycopg_conninfo(database_url), autocommit=True)
        self.connection.execute(f"LISTEN {PREFIXES}".encode())
        self.texts: list[str] = []

    def blocks(self, field: str = "blocks") -> set[bytes]:
        """Return the hashes of all announced blocks, or of those that were repeated."""
        self.texts += [each.payload for each in self.connection.notifies(timeout=0)]
        packed = [
            b64decode(keys)
            for each in self.texts
            for keys in json.loads(each).get(field, {}).values()
        ]
        return {keys[at : at + 8] for keys in packed for at in range(0, len(keys), 8)}

    async def until_all_heard(
        self, services: Sequence[Service], block_count: int, field: str = "blocks"
    ) -> None:
        """Wait until so many blocks were announced, and each process has taken them."""
        await until(lambda: len(self.blocks(field)) >= block_count, "the broadcasts")
        [row] = services[0].database.rows("SELECT clock_timestamp() AS now")
        self.connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, REPORT))
        query = "SELECT count(*) AS n FROM live_reports WHERE reported_at > %s"
        await until(
            lambda: services[0].database.rows(query, row["now"])[0]["n"] == len(services),
            "the reports, which follow the broadcasts",
        )


@pytest.fixture
def heard(gateways: Pair) -> Iterator[Heard]:
    """Yield the broadcasts of a test."""
    found = Heard(gateways[0].database_url)
    with found.connection:
        yield found


async def test_a_prompt_goes_where_another_process_has_sent_its_prefix(
    gateways: Pair, servers: list[ServerProcess], heard: Heard
) -> None:
    first, second = gateways
    tenant = await first.tenant()
    requested = prompts(1)

    cold = await cached_counts(first, tenant, requested)
    await heard.until_all_heard(gateways, PROMPT_COUNT * 6)
    # In another order: replicas with equal work take turns.
    turned = [*requested[1:], requested[0]]
    warm = await cached_counts(second, tenant, [[*prompt, 8, 9] for prompt in turned])

    assert not any(cold)
    assert min(warm) >= PROMPT_TOKENS - KV_BLOCK_TOKENS
    assert all(each.state()["prompt_token_count"] for each in servers), "both served some"
    assert max(len(text.encode()) for text in heard.texts) <= BYTES_MAX


async def test_other_organizations_do_not_learn_of_it(gateways: Pair, heard: Heard) -> None:
    """The hash of a block begins with the salt of its organization."""
    first, second = gateways
    tenant, stranger = await first.tenant(), await first.tenant()
    requested = prompts(2)

    await cached_counts(first, tenant, requested)
    await heard.until_all_heard(gateways, PROMPT_COUNT * 6)
    before = heard.blocks()
    found = await cached_counts(second, stranger, requested)
    await heard.until_all_heard(gateways, len(before) + PROMPT_COUNT * 6)

    assert not any(found)


async def test_prefixes_of_an_organization_bound_to_a_region_stay_private(
    gateways: Pair, heard: Heard
) -> None:
    first, _ = gateways
    bound, other = await first.tenant(), await first.tenant()
    operator = (await first.tenant(scopes=("admin",))).secret
    async with calls(first, operator) as call:
        await call("BindOrganization", organization=bound.name, region="eu")

    await cached_counts(first, bound, prompts(3))
    await cached_counts(first, other, prompts(4)[:1])  # announced later than the others would be
    await heard.until_all_heard(gateways, 6)

    assert len(heard.blocks()) == 6


async def test_a_process_that_starts_later_learns_what_others_have_sent(
    gateways: Pair, gateway: Callable[[], Service], heard: Heard
) -> None:
    first, second = gateways
    bound, tenant = await first.tenant(), await first.tenant()
    operator = (await first.tenant(scopes=("admin",))).secret
    async with calls(first, operator) as call:
        await call("BindOrganization", organization=bound.name, region="eu")
    requested = prompts(5)
    await cached_counts(first, bound, prompts(6))
    await cached_counts(first, tenant, requested[:4])
    await cached_counts(second, tenant, requested[4:])
    await heard.until_all_heard(gateways, PROMPT_COUNT * 6)
    announced = heard.blocks()

    late = gateway()
    await until(lambda: heard.blocks("earlier") >= announced, "the answers")
    await heard.until_all_heard((*gateways, late), len(announced), "earlier")
    warm = await cached_counts(late, tenant, [[*prompt, 8, 9] for prompt in requested])

    assert min(warm) >= PROMPT_TOKENS - KV_BLOCK_TOKENS, "all of them"
    assert len(announced) == PROMPT_COUNT * 6, "without those of the bound organization"
    assert max(len(text.encode()) for text in heard.texts) <= BYTES_MAX
