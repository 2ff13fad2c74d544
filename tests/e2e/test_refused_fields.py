"""Fields that an engine would ignore: refused by name before a hold is made, and listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb

from tests.calls import calls
from tests.inference.tensorrt_engines import tensorrt_service
from tests.service import MODEL, Service, Tenant

NO_VALUES = ""
REFUSED = {
    "sampling.min_p": NO_VALUES,
    "sampling.seed": NO_VALUES,
    "sampling.repetition_penalty": NO_VALUES,
    "sampling.presence_penalty": NO_VALUES,
    "sampling.frequency_penalty": NO_VALUES,
    "min_output_tokens": NO_VALUES,
    "beam_search": NO_VALUES,
    "max_reasoning_tokens": NO_VALUES,
    "prompt_logprobs": NO_VALUES,
    "top_logprobs": "with a temperature above 0",
}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
# Per field of the start frame: the fields of a request that uses it, and the HTTP parameter.
USES: dict[str, tuple[dict[str, Any], str, object]] = {
    "sampling.min_p": ({"sampling": pb.Sampling(**SAMPLED, min_p=0.2)}, "min_p", 0.2),
    "sampling.seed": ({"sampling": pb.Sampling(**SAMPLED, seed=5)}, "seed", 5),
    "sampling.presence_penalty": (
        {"sampling": pb.Sampling(presence_penalty=1.0)},
        "presence_penalty",
        1.0,
    ),
    "min_output_tokens": ({"min_output_tokens": 4}, "min_tokens", 4),
    "top_logprobs": ({"sampling": pb.Sampling(**SAMPLED), "top_logprobs": 2}, "top_logprobs", 2),
}


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> Iterator[Service]:
    """Yield a server with TensorRT-LLM's stand-in."""
    home = tmp_path_factory.mktemp("tensorrt")
    with tensorrt_service(home, model, postgres_server, template_database) as service:
        yield service


@pytest.mark.parametrize("field", USES)
async def test_a_field_is_refused_by_name_before_a_hold(service: Service, field: str) -> None:
    tenant = await service.tenant()
    used, parameter, value = USES[field]
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin(**used))
    with (
        openai.OpenAI(base_url=service.openai_url, api_key=tenant.secret, max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            temperature=1.0,
            extra_body={parameter: value, "logprobs": parameter == "top_logprobs"},
        )

    violations = refusal.detail(error_details_pb2.BadRequest)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert violations is not None
    assert [each.field for each in violations.field_violations] == [field]
    assert refused.value.param == parameter
    assert service.database.holds(tenant) == {}


async def test_an_echo_with_logprobs_is_refused_by_name(service: Service, tenant: Tenant) -> None:
    with openai.OpenAI(base_url=service.openai_url, api_key=tenant.secret) as client:
        with pytest.raises(openai.BadRequestError, match="does not support") as refused:
            client.completions.create(
                model=MODEL, prompt="Hi", max_tokens=1, echo=True, logprobs=1, temperature=0
            )
        plain = client.completions.create(model=MODEL, prompt="Hi", max_tokens=1, echo=True)

    assert refused.value.param == "echo"
    assert plain.choices[0].text.startswith("Hi")


def mapped_files(pid: int) -> str:
    """Return the libraries and files that a process has mapped; empty without /proc."""
    maps = Path(f"/proc/{pid}/maps")
    return maps.read_text() if maps.exists() else ""


async def test_the_fields_are_listed_over_grpc_and_http(service: Service, tenant: Tenant) -> None:
    async with calls(service, tenant.secret) as call:
        listed = await call("ListModels")
    with openai.OpenAI(base_url=service.openai_url, api_key=tenant.secret) as client:
        facts: dict[str, Any] = client.models.retrieve(MODEL).model_extra["weir"]  # type: ignore[index]
    [model] = listed.models

    async with service.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=4))
    assert service.process is not None
    assert "libtorch" not in mapped_files(service.process.pid), "another process computes"
    assert {each.field: each.values for each in model.refused_fields} == REFUSED
    assert {"parameter": "min_tokens", "values": ""} in facts["refused_parameters"]
    assert len(facts["refused_parameters"]) == len(REFUSED)
