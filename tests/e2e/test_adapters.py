"""LoRA adapters of a TensorRT-LLM engine as models: listed, priced, billed, prefixes apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from weir_client import AsyncAdminClient

from tests.calls import calls
from tests.inference.tensorrt_adapters import write_adapter, write_report
from tests.inference.tensorrt_engines import tensorrt_service
from tests.service import MODEL, PLAIN_IDS, Service, Tenant

ADAPTERS = (f"{MODEL}:formal", f"{MODEL}:terse")


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a server with TensorRT-LLM's stand-in and two adapters."""
    home = tmp_path_factory.mktemp("tensorrt")
    with tensorrt_service(
        *(home, model, postgres_server, template_database),
        lora_adapters={name: write_adapter(home / name.partition(":")[2]) for name in ADAPTERS},
        lora_report=str(write_report(home / "report.json")),
    ) as service:
        yield service


async def priced_tenant(service: Service) -> Tenant:
    """Return a tenant with a price for each adapter."""
    tenant = await service.tenant(scopes=("admin", "inference"))
    async with AsyncAdminClient(service.address, tenant.secret) as admin:
        for factor, name in enumerate(ADAPTERS, 2):
            await admin.set_price(
                name,
                organization=tenant.name,
                input_picos_per_token=0,
                cached_input_picos_per_token=0,
                output_picos_per_token=factor * 1_000_000,
            )
    return tenant


async def test_adapters_are_models_with_prices_of_their_own(service: Service) -> None:
    tenant = await priced_tenant(service)
    prompt = random.Random(1).sample(PLAIN_IDS, 200)
    async with calls(service, tenant.secret) as call:
        listed = await call("ListModels")

    async with service.stream(tenant.secret) as stream:
        names = (MODEL, *ADAPTERS)
        ids = [await stream.begin(model=name, prompt=prompt, max_output_tokens=6) for name in names]
        finished = await asyncio.gather(*map(stream.finished, ids))
        outputs = [stream.token_ids(each) for each in ids]
        again = await stream.finished(await stream.begin(model=ADAPTERS[0], prompt=prompt))

    events = [service.database.event(tenant, each) for each in ids]
    assert {*names} <= {model.name for model in listed.models}
    assert outputs[1:] == [[17] * 6, [18] * 6]
    assert not {17, 18} & {*outputs[0]}
    assert [each.usage.cached_input_token_count for each in finished] == [0, 0, 0]
    assert again.usage.cached_input_token_count > 0
    assert [event["model"] for event in events] == [*names]
    assert [event["cost_picos"] for event in events[1:]] == [12_000_000, 18_000_000]


async def test_every_call_takes_the_name_of_an_adapter(service: Service) -> None:
    tenant = await priced_tenant(service)
    name = ADAPTERS[1]

    async with service.client(tenant.secret) as client:
        models = {model.name: model for model in await client.list_models()}
        quote = await client.quote(name, token_ids=PLAIN_IDS[:10], max_output_tokens=3)
        counted = await client.count_tokens(name, text="Hi")
    with openai.OpenAI(base_url=service.openai_url, api_key=tenant.secret) as http:
        listed = {model.id for model in http.models.list()}
        completion = http.completions.create(model=name, prompt="Hi", max_tokens=3)

    assert quote.would_admit
    assert counted.input_token_count > 0
    assert {MODEL, *ADAPTERS} <= listed
    assert models[name].context_window_tokens == models[MODEL].context_window_tokens
    assert completion.model == name
    assert completion.choices[0].text == service.tokenizer.decode((18, 18, 18))
