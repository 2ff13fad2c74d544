"""Receipts for customers: at the end of a request, by id and by month, and through the commands."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from weir.v1 import receipt_service_pb2
from weir_cli.__main__ import app
from weir_client import (
    AsyncReceiptClient,
    FinishReason,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Receipt,
    public_keys,
    verify_receipt,
    verify_receipts,
)
from weir_client.receipt_months import totals_of

from metering.core.models import QuotaDimension
from metering.ledger.rating import rate_all_pending
from tests.service import Service, Tenant, picos, running

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 100_000}
Command = Callable[..., Awaitable[Result]]


def client(service: Service, secret: str) -> AsyncReceiptClient:
    """Return the SDK's client."""
    return AsyncReceiptClient(service.address, secret, tls=False)


async def keys_of(service: Service, secret: str) -> dict[str, bytes]:
    """Return the service's public keys."""
    async with client(service, secret) as receipts:
        return public_keys(await receipts.list_receipt_keys())


async def test_a_result_has_a_receipt_that_verifies(service: Service) -> None:
    tenant = await service.tenant(LIMITS)

    async with service.client(tenant.secret) as weir:
        result = await weir.complete(
            "tiny", "Which hotel has a garden?", max_output_tokens=8, ignore_eos=True
        )
        generation = await weir.get_generation(result.request_id)

    [receipt] = result.receipts
    verify_receipt(receipt, await keys_of(service, tenant.secret))
    assert (receipt.request_id, receipt.model) == (result.request_id, result.model)
    assert receipt.outcome == "length"
    assert receipt.organization_id == str(tenant.organization_id)
    assert receipt.project_id == str(tenant.project_id)
    assert receipt.api_key_id == str(tenant.key.id)
    assert receipt.input_token_count == result.usage.input_token_count
    assert receipt.cached_input_token_count == result.usage.cached_input_token_count
    assert receipt.billed_token_count == result.usage.billed_token_count == 8
    assert receipt.currency_code == result.cost.currency_code
    assert receipt.cost_picos == result.cost.picos
    assert receipt.admit_time == generation.admit_time
    assert receipt.settle_time == generation.settle_time
    assert generation.receipts == (receipt,)


async def test_every_request_at_once_gets_its_own_position_in_the_chain(service: Service) -> None:
    """Some are cancelled on the way."""
    tenant = await service.tenant(LIMITS)

    async with service.stream(tenant.secret) as stream:
        # Every third one is cancelled, and without credit cannot end earlier.
        credits = [None if index % 3 else 1 for index in range(12)]
        request_ids = [
            await stream.begin(max_output_tokens=40, initial_credit_tokens=each) for each in credits
        ]
        for request_id in request_ids[::3]:
            await stream.received(request_id, 1)
        await stream.cancel(*request_ids[::3])
        ends = [await stream.finished(request_id) for request_id in request_ids]
    async with client(service, (await service.new_key(tenant, "billing"))[1]) as receipts:
        month = ends[0].receipts[0].settle_time.ToDatetime().strftime("%Y-%m")
        listed = [each async for each in receipts.list_receipts(tenant.name, month)]
        summary = await receipts.get_receipt_month(tenant.name, month)

    assert sorted(end.receipts[0].sequence for end in ends) == list(range(1, 13))
    assert all(end.receipts[0].cost_picos == picos(end.cost) for end in ends)
    assert {each.outcome for each in listed} == {"length", "cancelled"}
    verdict = verify_receipts(
        listed,
        await keys_of(service, tenant.secret),
        month=month,
        organization_id=str(tenant.organization_id),
        root=summary.root,
        totals=totals_of(listed),
    )
    assert verdict.problems == ()
    assert (verdict.receipt_count, verdict.signed_count) == (12, 12)
    [chain] = summary.chains
    assert (chain.first_sequence, chain.last_sequence, chain.receipt_count) == (1, 12, 12)


async def test_a_request_that_used_nothing_has_no_receipt(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 0})

    async with service.stream(tenant.secret) as stream:
        end = await stream.end(await stream.begin())

    assert end.WhichOneof("kind") == "failed"
    assert not end.failed.receipts


async def test_receipts_are_for_finance_and_public_keys_for_everyone(service: Service) -> None:
    tenant, other = await service.tenant(), await service.tenant()
    _, billing = await service.new_key(tenant, "billing")
    _, admin = await service.new_key(other, "admin")

    async with client(service, tenant.secret) as inference:
        assert await inference.list_receipt_keys()
        with pytest.raises(PermissionDenied):
            await anext(inference.list_receipts(tenant.name, "2026-11"))
        with pytest.raises(PermissionDenied):
            await inference.get_receipt_month(tenant.name, "2026-11")
    async with client(service, billing) as finance:
        assert [each async for each in finance.list_receipts(tenant.name, "2026-11")] == []

        async def first(organization: str, month: str) -> object:
            return await anext(finance.list_receipts(organization, month))

        for call in (first, finance.get_receipt_month):
            with pytest.raises(NotFound):
                await call(other.name, "2026-11")
            with pytest.raises(InvalidRequest, match="month"):
                await call(tenant.name, "2026-13")
        request = receipt_service_pb2.ListReceiptsRequest(
            organization=tenant.name, month="2026-11", page_token="here"
        )
        with pytest.raises(InvalidRequest, match="page_token"):
            await finance._call(finance._stub.ListReceipts, request)
    async with client(service, admin) as operator:
        assert (await operator.get_receipt_month(tenant.name, "2026-11")).receipt_count == 0


@dataclass(frozen=True, slots=True)
class Month:
    """Files of a tenant's receipts, as finance has them."""

    tenant: Tenant
    month: str
    receipts: Path
    keys: Path
    report: Path
    weir: Command


@pytest.fixture
async def month(service: Service, tmp_path: Path) -> Month:
    """Yield five rated requests, the third for an end user, exported by the commands."""
    tenant = await service.tenant(LIMITS)
    _, admin = await service.new_key(tenant, "admin")
    environment = {
        "WEIR_ADDRESS": service.address,
        "WEIR_API_KEY": admin,
        "WEIR_HOME": str(tmp_path),
        "COLUMNS": "200",
    }

    async def weir(*arguments: str, stdin: str = "", address: str = "") -> Result:
        # In a thread: the command has its own event loop.
        runner = CliRunner(env=environment | ({"WEIR_ADDRESS": address} if address else {}))
        return await asyncio.to_thread(
            runner.invoke, app, arguments, input=stdin, catch_exceptions=False
        )

    async with service.client(tenant.secret) as inference:
        results = [
            await inference.complete(
                "tiny",
                "Which hotel?",
                max_output_tokens=tokens,
                ignore_eos=True,
                end_user="user-4711" if tokens == 3 else None,
                labels={"team": "search"} if tokens == 3 else None,
            )
            for tokens in range(1, 6)
        ]
    await rate_all_pending(service.sessions)
    name = results[0].receipts[0].month
    files = Month(
        tenant,
        name,
        tmp_path / "receipts.jsonl",
        tmp_path / "keys.json",
        tmp_path / "report.json",
        weir,
    )
    org = ("--org", tenant.name)
    assert (
        await weir("receipt", "export", name, *org, "--output", str(files.receipts))
    ).exit_code == 0
    files.keys.write_text((await weir("receipt", "keys", "--json")).stdout)
    await weir("month", "show", name, *org, "--format", "json", "--output", str(files.report))
    assert [result.finish_reason for result in results] == [FinishReason.LENGTH] * 5
    return files


def problems(done: Result) -> list[str]:
    """Return the reported faults."""
    return [line.removeprefix("✗ ") for line in done.stdout.splitlines() if line.startswith("✗")]


async def test_a_month_is_verified_without_a_server(month: Month) -> None:
    shown = json.loads(
        (
            await month.weir("receipt", "month", month.month, "--org", month.tenant.name, "--json")
        ).stdout
    )
    files = ("--keys", str(month.keys), "--report", str(month.report), "--root", shown["root"])

    done = await month.weir("receipt", "verify", str(month.receipts), *files, address="127.0.0.1:1")
    document = await month.weir(
        "receipt",
        "verify",
        "-",
        *files,
        "--json",
        stdin=month.receipts.read_text(),
        address="127.0.0.1:1",
    )

    assert done.exit_code == 0, done.stdout
    assert "✓ 5 receipts of 1 project, 5 signed: unaltered" in done.stdout
    assert f"✓ complete: the root is {shown['root']}" in done.stdout
    assert f"✓ the sums match the report of {month.month}" in done.stdout
    assert json.loads(document.stdout)["valid"] is True


async def test_the_reason_is_precise(month: Month) -> None:
    lines = month.receipts.read_text().splitlines()
    second = Receipt.from_json(lines[1])

    async def message(*changed: str, **options: str) -> list[str]:
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        files = ("--keys", str(month.keys), *arguments)
        done = await month.weir("receipt", "verify", "-", *files, stdin="\n".join(changed))
        assert done.exit_code == 1, done.stdout + done.stderr
        return problems(done)

    altered = lines[1].replace('"billed_token_count":2', '"billed_token_count":1')
    [problem] = await message(lines[0], altered, *lines[2:])
    assert problem == f"{second} was altered: billed_token_count is 1, originally 2"
    [gap] = await message(lines[0], *lines[3:], month=month.month)
    assert gap == f"gap: receipts 2 to 3 are missing of project {second.project_id}"
    assert all("belongs to" in each for each in await message(*lines, month="2020-01"))
    third = Receipt.from_json(lines[2])
    altered = lines[2].replace("user-4711", "user-4712")
    [problem] = await message(*lines[:2], altered, *lines[3:])
    assert problem.startswith(f"{third} is not for end_user 'user-4712'")
    altered = lines[2].replace('"team":"search"', '"team":"sales"')
    [problem] = await message(*lines[:2], altered, *lines[3:])
    assert problem.startswith(f"{third} does not have labels {{'team': 'sales'}}")
    altered = lines[4].replace('"model":"', '"model":"x')
    assert any("was altered" in each for each in await message(*lines[:4], altered))
    [root] = await message(*lines[:-1], root="00" * 32)
    assert root.startswith("the root over these receipts is")
    sums = await message(*lines[1:], report=str(month.report))
    assert any("output tokens, the report says 15" in each for each in sums)
    stranger = re.sub(r'"public_key": "..', '"public_key": "00', month.keys.read_text())
    (month.keys.parent / "other.json").write_text(stranger)
    refused = await month.weir(
        "receipt", "verify", str(month.receipts), "--keys", str(month.keys.parent / "other.json")
    )
    assert refused.exit_code == 2
    assert "does not match its id" in refused.stderr


async def test_names_are_in_exports_only_and_the_operator_can_hide_them(
    service: Service, month: Month, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    exported = [Receipt.from_json(line) for line in month.receipts.read_text().splitlines()]
    named = exported[2]
    assert [each.version for each in exported] == [3, 3, 4, 3, 3]
    assert (named.end_user, dict(named.labels)) == ("user-4711", {"team": "search"})
    hidden = replace(named, end_user="", end_user_salt=b"", labels={}, labels_salt=b"")

    async with service.client(month.tenant.secret) as weir:
        generation = await weir.get_generation(named.request_id)
    home = tmp_path_factory.mktemp("hashed")
    with running(Service(home, service.database_url, model, receipt_subjects="hashed")) as other:
        _, billing = await other.new_key(month.tenant, "billing")
        async with client(other, billing) as receipts:
            listed = [each async for each in receipts.list_receipts(month.tenant.name, month.month)]

    assert listed == [*exported[:2], hidden, *exported[3:]]
    assert generation.receipts == (hidden,)
    verify_receipt(hidden, await keys_of(service, month.tenant.secret))


async def test_invalid_files_are_refused_by_line(month: Month, tmp_path: Path) -> None:
    for arguments, stdin, message in (
        (("-", "--keys", str(month.keys)), "\n{}\n", "line 2 is not a receipt: version"),
        ((str(tmp_path / "none"),), "", "none cannot be read"),
        (
            (str(month.receipts), "--keys", str(month.receipts)),
            "",
            "write it with `weir receipt keys --json`",
        ),
        ((str(month.receipts), "--report", str(month.keys)), "", "write it with `weir month show"),
        ((str(month.receipts), "--keys", str(month.keys), "--root", "xyz"), "", "non-hexadecimal"),
    ):
        done = await month.weir("receipt", "verify", *arguments, stdin=stdin)
        assert done.exit_code == 2, done.stdout
        assert message in done.stderr


async def test_a_request_is_verified_from_its_trace(month: Month) -> None:
    last = Receipt.from_json(month.receipts.read_text().splitlines()[-1])

    traced = json.loads(
        (
            await month.weir("trace", last.request_id, "--json", "--api-key", month.tenant.secret)
        ).stdout
    )
    line = json.dumps(traced["receipts"][0])
    done = await month.weir("receipt", "verify", "-", stdin=line)  # keys from the server

    assert Receipt.from_json(line) == last
    assert done.exit_code == 0
    assert "public keys from" in done.stderr
