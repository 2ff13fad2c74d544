"""Models for tests of tools: one that calls them, one with scripted output, and one that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from tests.conftest import new_database
from tests.inference.tool_checkpoints import (
    STRICT_TEMPLATE,
    make_scripted_checkpoint,
    make_tool_checkpoint,
)
from tests.service import MODEL, Service, make_model, running

SCRIPT = "script"  # outputs the text that a test sets
STRICT = "strict"  # the same, with a template of one call per turn and ids of nine characters
PLAIN = "plain"  # has a template without tools
PIECES = (
    *(
        "Let me see.",
        "\n",
        "<tool_call>",
        '{"name": "book",',
        ' "arguments": {"hotel":',  # no token ends where a grammar forces the next text
        ' "Ulm"',
        ', "nights"',
        ": 2",
        "}}",
    ),
    *(
        "</tool_call>",
        "\n<tool_call>\n",
        '{"name": "quit", "arguments": {',
        "}}\n",
        "</tool_call>\n",
        " Bye",
    ),
)
STAY = {
    "type": "object",
    "properties": {"nights": {"enum": [1, 2]}},
    "required": ["nights"],
    "additionalProperties": False,
}
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
def running_with_tools(
    directory: Path, postgres_server: str, template_database: str
) -> Iterator[Service]:
    """Yield the service."""
    models = {
        MODEL: make_tool_checkpoint(directory / "tools"),
        SCRIPT: make_scripted_checkpoint(directory / "script", PIECES),
        STRICT: make_scripted_checkpoint(directory / "strict", PIECES, STRICT_TEMPLATE),
        PLAIN: make_model(directory / "plain"),
    }
    with (
        new_database(postgres_server, template=template_database) as url,
        running(Service(directory / "home", url, models[MODEL], models=models)) as service,
    ):
        yield service


def ending_bias(service: Service) -> dict[int, float]:
    """Return biases by which random output ends, and does not write blanks endlessly."""
    return {
        token_id: 8.0
        for text in ('"', "}", "]")
        for token_id in service.tokenizer.encode(text, add_special_tokens=False)
    }


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Check arguments against the schemas above."""
    if name == "quit":
        assert arguments == {}
        return
    assert set(arguments) == {"hotel", "stay"}
    assert arguments["hotel"] in ("Ulm", "Rom")
    assert arguments["stay"]["nights"] in (1, 2)
