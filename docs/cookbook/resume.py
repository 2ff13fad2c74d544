"""Survive a crash: started again, the program goes on with the answer where it stopped."""

import json
import sys
import uuid
from pathlib import Path

from weir_client import Client, GenerationStream, NotFound

STATE = Path(sys.argv[1] if len(sys.argv) > 1 else "story.json")


def save(state: dict[str, object]) -> None:
    """Replace the file in one step: a crash leaves the old one or the new one, never half of it."""
    fresh = STATE.with_suffix(".new")
    fresh.write_text(json.dumps(state))
    fresh.rename(STATE)


def receive(stream: GenerationStream) -> None:
    """Print the output, and note how far it was received."""
    for delta in stream:
        print(delta.text, end="", flush=True)
        save({"request_id": stream.request_id, "seq": delta.seq})


if not STATE.exists():  # the id is saved before the request is sent: it is all that a restart needs
    save({"request_id": str(uuid.uuid4()), "seq": 0})
state = json.loads(STATE.read_text())
with Client() as client:
    try:
        receive(client.attach(state["request_id"], after_seq=state["seq"]))
    except NotFound:  # it was never sent
        receive(
            client.generate(
                "demo",
                "Tell me a long story about a hotel.",
                max_output_tokens=400,
                request_id=state["request_id"],
                keep_on_disconnect=300,  # seconds for which the server goes on without this program
            )
        )
STATE.unlink()
