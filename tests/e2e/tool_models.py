"""What the tests of tools share: a service with a model that calls them, one that says what it is told to, and one that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from tests.conftest import new_database
from tests.inference.tool_checkpoints import make_scripted_checkpoint, make_tool_checkpoint
from tests.service import MODEL, Service, Tenant, make_model, price_model, running

SCRIPT = "script"  # the model that says what the test wants
PLAIN = "plain"  # the model whose template knows no tools
PIECES = (
    *("Let me see.", "\n", "<tool_call>", '{"name": "book", ', '"arguments": {"hotel": ', '"Ulm"', ', "nights"', ": 2", "}}"),
    *("</tool_call>", "\n<tool_call>\n", '{"name": "quit", "arguments": {', "}}\n", "</tool_call>\n", " Bye"),
)
STAY = {"type": "object", "properties": {"nights": {"enum": [1, 2]}}, "required": ["nights"], "additionalProperties": False}
HOTEL = {
    "type": "object",
    "properties": {"hotel": {"enum": ["Ulm", "Rom"]}, "stay": {"$ref": "#/$defs/stay"}},
    "required": ["hotel", "stay"],
    "additionalProperties": False,
    "$defs": {"stay": STAY},
}
DEEP = '{"a":' * 70 + "1" + "}" * 70
TOOLS = [
    pb.Tool(name="book", description="Books a room.", parameters_json_schema=json.dumps(HOTEL)),
    pb.Tool(name="quit", description="Ends the talk."),
]
REQUIRED = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)


@contextmanager
def running_with_tools(directory: Path, postgres_server: str, template_database: str) -> Iterator[Service]:
    """The service."""
    models = {
        MODEL: make_tool_checkpoint(directory / "tools"),
        SCRIPT: make_scripted_checkpoint(directory / "script", PIECES),
        PLAIN: make_model(directory / "plain"),
    }
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(directory / "home", url, models[MODEL], models=models)) as service,
    ):
        yield service


async def priced(service: Service) -> Tenant:
    """A tenant that may use all three."""
    tenant = await service.tenant()
    async with service.session() as session:
        for model in (SCRIPT, PLAIN):
            await price_model(session, model)
    return tenant


def to_the_point(service: Service) -> dict[int, float]:
    """Biases by which noise comes to an end, and does not write blanks for ever."""
    return {token_id: 8.0 for text in ('"', "}", "]") for token_id in service.tokenizer.encode(text, add_special_tokens=False)}


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """What the schemas above say."""
    if name == "quit":
        assert arguments == {}
        return
    assert set(arguments) == {"hotel", "stay"}
    assert arguments["hotel"] in ("Ulm", "Rom")
    assert arguments["stay"]["nights"] in (1, 2)
