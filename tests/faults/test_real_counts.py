"""Usage, ledger, invoices and quotas beside the counters of a real vLLM, with kills of both.

Rounds of requests that end are followed by a kill of Weir or of vLLM under other requests. Each
difference has a name: output that was computed and not delivered, cached tokens of outputs without
a last message, prompts of further choices, and Weir's own probes, which are counted before.

`WEIR_TEST_COUNTED_REQUESTS`, `_TENANTS`, `_KILLS` and `_ENGINE_KILLS` set its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import urllib.request
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from weir.v1 import inference_service_pb2 as pb

from inference.adapters.remote_settings import Service as Wire
from inference.text.tokenizer import Tokenizer
from metering.core.models import QuotaDimension
from metering.invoicing.months import month_report
from metering.ledger.rating import rate_all_pending
from metering.store.db import create_engine, create_sessions
from tests.inference.checkpoints import make_checkpoint
from tests.inference.real_servers import SHAPE, RealServer, end, free_port, needs, vllm_server
from tests.metering.invariants import check_invariants
from tests.service import MODEL, PLAIN_IDS, Service, Tenant, running, until

pytestmark = [*needs("vllm"), pytest.mark.faults]

REQUESTS = int(os.environ.get("WEIR_TEST_COUNTED_REQUESTS", "90"))
TENANTS = int(os.environ.get("WEIR_TEST_COUNTED_TENANTS", "3"))
KILLS = int(os.environ.get("WEIR_TEST_COUNTED_KILLS", "2"))
ENGINE_KILLS = int(os.environ.get("WEIR_TEST_COUNTED_ENGINE_KILLS", "1"))
AT_ONCE, RUNNING, LONG = 10, 4, 1800
TENANTS_AT_ONCE = 10
LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.COST_PICOS_PER_MONTH: 10**17}
COUNTERS = {
    "vllm:prompt_tokens_total": "input",
    "vllm:prefix_cache_hits_total": "cached",
    "vllm:generation_tokens_total": "output",
}
Counts = dict[str, int]
_log = logging.getLogger("weir.tests.counts")


def counted(address: str) -> Counts:
    """Return the sums of a server's counters."""
    sums = dict.fromkeys(COUNTERS.values(), 0)
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if (name := COUNTERS.get(line.partition("{")[0])) is not None:
                sums[name] += round(float(line.rpartition(" ")[2]))
    return sums


def billed(service: Service, tenants: Sequence[Tenant]) -> Counts:
    """Return the sums of the usage events."""
    events = [event for tenant in tenants for event in service.database.events(tenant)]
    return {
        "input": sum(each["input_token_count"] for each in events),
        "cached": sum(each["cached_input_token_count"] for each in events),
        "output": sum(each["billed_token_count"] for each in events),
    }


def minus(first: Counts, second: Counts) -> Counts:
    return {name: first[name] - second[name] for name in first}


def plus(first: Counts, second: Counts) -> Counts:
    return {name: first[name] + second[name] for name in first}


class Heads:
    """Prompts that begin alike within a tenant, and partly between tenants. None ends within a
    character: otherwise vLLM would not get the stop sequence, and run on.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._random = random.Random(uuid.uuid4().int)
        self._whole = list(tokenizer.encode("a", add_special_tokens=False))
        self._heads = [self._random.choices(PLAIN_IDS, k=160) for _ in range(4)]

    def prompt(self) -> list[int]:
        head = self._random.choice(self._heads)[: self._random.choice((64, 100, 160))]
        return head + self._random.choices(PLAIN_IDS, k=self._random.randint(1, 40)) + self._whole


async def serve_regularly(service: Service, tenant: Tenant, heads: Heads, count: int) -> None:
    """Run requests to their end, some at once, some longer than a slice of the lease, some ended by
    a stop sequence.
    """
    async with service.stream(tenant.secret) as stream:
        for first in range(0, count, AT_ONCE):
            ids = [
                await stream.begin(
                    prompt=heads.prompt(),
                    max_output_tokens=300 if number % 7 == 0 else 20,
                    stop_sequences=["e", "xyz"] if number % 3 == 0 else [],
                )
                for number in range(first, min(first + AT_ONCE, count))
            ]
            for request_id in ids:
                await stream.finished(request_id)


async def begin_long(stream: Any, heads: Heads) -> tuple[list[str], int]:
    """Begin outputs that do not end by themselves; return their ids once some is delivered, and the
    tokens of their prompts.
    """
    prompts = [heads.prompt() for _ in range(RUNNING)]
    ids = [await stream.begin(prompt=each, max_output_tokens=LONG) for each in prompts]
    for request_id in ids:
        await stream.received(request_id, 20)
        # The transport has taken a message for certain when the next one has come.
        await stream.received(request_id, len(stream.token_ids(request_id)) + 1)
    return ids, sum(map(len, prompts))


def unexplained_cached(service: Service, tenant: Tenant, ids: Sequence[str]) -> list[Any]:
    """Return the requests with cached tokens on the bill whose output was not whole, so that the
    server had not told them.
    """
    return [
        event
        for event in service.database.events(tenant)
        if str(event["request_id"]) in ids
        and event["cached_input_token_count"]
        and event["generated_token_count"] < LONG
    ]


async def quiet(address: str) -> Counts:
    """Wait until a server computes nothing any more; return its counters."""
    last: Counts = {}
    while (now := counted(address)) != last:
        last = now
        await asyncio.sleep(0.5)  # vLLM has no event for this
    return now


def in_ledger(service: Service, tenants: Sequence[Tenant]) -> Counts:
    """Return the tokens of the ledger's entries by kind, with cached input as part of input."""
    query = """SELECT token_kind, sum(token_count)::bigint AS n FROM ledger_entries
        JOIN ledger_transactions t ON t.id = transaction_id
        WHERE token_kind IS NOT NULL AND t.organization_id = ANY(%s) GROUP BY 1"""
    rows = service.database.rows(query, [each.organization_id for each in tenants])
    kinds = {str(row["token_kind"]): int(row["n"]) for row in rows}
    cached = kinds.get("cached_input", 0)
    return {"input": kinds["input"] + cached, "cached": cached, "output": kinds["output"]}


async def on_invoices(service: Service, tenants: Sequence[Tenant]) -> Counts:
    """Return the tokens on the invoices as they would be now, as in `in_ledger`."""
    kinds: Counter[str] = Counter()
    months = {
        f"{event['settled_at']:%Y-%m}"
        for each in tenants
        for event in service.database.events(each)
    }
    async with service.session() as session:
        for tenant, month in itertools.product(tenants, months):
            report = await month_report(session, organization=tenant.name, month=month)
            for line in report.lines:
                kinds[line.token_kind] += line.token_count
    cached = kinds["cached_input"]
    return {"input": kinds["input"] + cached, "cached": cached, "output": kinds["output"]}


@pytest.mark.timeout(900 + 2 * REQUESTS)
async def test_the_database_equals_the_counters_of_vllm(database_url: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "checkpoint", seed=3, shape=SHAPE).directory
    port, option = free_port(), "--enable-prefix-caching"
    heads = Heads(Tokenizer(directory))
    address = f"127.0.0.1:{port}"
    service = Service(
        tmp_path / "home",
        database_url,
        directory,
        engine="remote",
        models={MODEL: directory},
        remote_targets={MODEL: f"openai+http://{address}/tiny"},
        remote_probe_s=86_400.0,
    )
    with contextlib.ExitStack() as stack:

        def start_vllm(number: int) -> RealServer:
            log = tmp_path / f"vllm-{number}.log"
            opened = vllm_server(directory, log, Wire.OPENAI_HTTP, option, port=port)
            return stack.enter_context(opened)

        server = start_vllm(0)
        stack.enter_context(running(service))
        tenants = [await service.tenant(LIMITS) for _ in range(TENANTS)]
        await until(service.serving, "the server to be checked")
        round_count = KILLS + ENGINE_KILLS
        kills_vllm = {
            (index + 1) * round_count // ENGINE_KILLS - 1 for index in range(ENGINE_KILLS)
        }
        ended = unbilled = dict.fromkeys(COUNTERS.values(), 0)
        begun_count = killed_count = 0
        for number in range(round_count):
            # Requests that end by themselves or by a stop sequence: no difference.
            first = number * TENANTS_AT_ONCE
            at_once = [tenants[(first + index) % TENANTS] for index in range(TENANTS_AT_ONCE)]
            at_once = at_once[: min(TENANTS, TENANTS_AT_ONCE)]
            target = REQUESTS * (number + 1) // round_count
            shares = [
                (target - begun_count + index) // len(at_once) for index in range(len(at_once))
            ]
            before, database = await quiet(address), billed(service, tenants)
            async with asyncio.TaskGroup() as tasks:
                for tenant, count in zip(at_once, shares, strict=True):
                    tasks.create_task(serve_regularly(service, tenant, heads, count))
            begun_count = target
            regular = minus(await quiet(address), before)
            in_database = minus(billed(service, tenants), database)
            _log.info("round %d, %d requests: vLLM %s", number, target, regular)
            assert minus(regular, in_database) == dict.fromkeys(regular, 0)
            ended = plus(ended, regular)

            tenant = tenants[number % TENANTS]
            killed_count += RUNNING
            before, database = await quiet(address), billed(service, tenants)
            if number in kills_vllm:
                # The server is killed: delivered output is billed.
                async with service.stream(tenant.secret) as stream:
                    ids, input_count = await begin_long(stream, heads)
                    end(server.process)
                    for request_id in ids:
                        await stream.end(request_id)
                await service.no_hold_left(tenant)
                lost = minus(billed(service, tenants), database)
                assert lost["output"] == sum(len(stream.token_ids(each)) for each in ids)
                assert lost["input"] == input_count
                if number + 1 < round_count:
                    server = start_vllm(number + 1)
            else:
                # Weir is killed: the server computed more output, and its cached tokens are not
                # known.
                async with service.stream(tenant.secret) as stream:
                    ids, input_count = await begin_long(stream, heads)
                    service.kill()
                    await stream.closed()
                served = minus(await quiet(address), before)
                service.start()
                await service.no_hold_left(tenant)
                killed = minus(billed(service, tenants), database)
                assert killed["input"] == served["input"] == input_count
                assert served["output"] >= killed["output"]
                unbilled = plus(unbilled, minus(served, killed))
            assert unexplained_cached(service, tenant, ids) == []
            if number + 1 < round_count:
                await until(service.serving, "the server to be checked again")
                if number == 0:
                    await check_choices(service, tenants, heads, address)
        assert ended["cached"] > 0

        engine = create_engine(database_url)
        await rate_all_pending(create_sessions(engine))
        await engine.dispose()
        in_events = billed(service, tenants)
        _log.info(
            "%d requests ended, %d killed in %d kills of Weir and %d of vLLM; ended: vLLM %s,"
            " difference 0; killed with Weir: vLLM counts %s more; all on usage, ledger, invoices:"
            " %s",
            *(REQUESTS, killed_count, KILLS, ENGINE_KILLS, ended, unbilled, in_events),
        )
        assert in_ledger(service, tenants) == in_events
        assert await on_invoices(service, tenants) == in_events
        for tenant in tenants:
            cost = sum(event["cost_picos"] for event in service.database.events(tenant))
            assert service.database.counters(tenant)["cost_picos_per_month"] == (cost, 0)
        await asyncio.to_thread(service.stop)
    check_invariants(database_url, all_ended=True)


async def check_choices(
    service: Service, tenants: Sequence[Tenant], heads: Heads, address: str
) -> None:
    """Check several choices: the server computes the prompt for each, Weir bills it once."""
    before, database = await quiet(address), billed(service, tenants)
    prompt = heads.prompt()
    async with service.stream(tenants[0].secret) as stream:
        hot = pb.Sampling(temperature=1.0)
        fields = {"choice_count": 3, "max_output_tokens": 20, "sampling": hot}
        request_id = await stream.begin(prompt=prompt, **fields)
        await stream.finished(request_id)
    choices = minus(minus(await quiet(address), before), minus(billed(service, tenants), database))
    assert (choices["input"], choices["output"]) == (2 * len(prompt), 0)
