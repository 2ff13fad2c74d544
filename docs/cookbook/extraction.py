"""Turn text into a record: the answer always fits the JSON schema."""

import json
from dataclasses import dataclass

from weir_client import Client, FinishReason

MAIL = "We were at the Sea View in Rome for 3 nights. The pool was lovely, the breakfast cold."
SCHEMA = {
    "type": "object",
    "properties": {
        "hotel": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "maxLength": 40},
        "nights": {"type": "integer", "minimum": 0, "maximum": 365},
        "mood": {"enum": ["happy", "mixed", "angry"]},
    },
    "required": ["hotel", "city", "nights", "mood"],
    "additionalProperties": False,
}


@dataclass
class Stay:
    """One stay at a hotel."""

    hotel: str
    city: str
    nights: int
    mood: str


with Client() as client:
    result = client.complete(
        "demo",
        f"Extract the stay from this mail as JSON.\n\n{MAIL}",
        json_schema=SCHEMA,
        temperature=0,
        max_output_tokens=300,
    )
if result.finish_reason is FinishReason.LENGTH:  # the only way in which the JSON is incomplete
    raise SystemExit("The answer was cut off: give it more tokens.")
print(Stay(**json.loads(result.text)))
