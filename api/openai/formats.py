"""What an answer must look like, as `response_format` of the chat API and `text.format` of the responses API say it."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb

from api.openai.refusals import wrong_parameter

ANY_OBJECT = '{"type": "object"}'
ABSENT = Raw(b"null")
CHAT_FIELD = "response_format"  # of the chat API, which wraps the schema


class Schema(Struct, forbid_unknown_fields=True):
    """A JSON schema with its name. It is kept strictly, also where `strict` does not ask for that."""

    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


class Format(Struct, forbid_unknown_fields=True):
    """A format in either API: the chat API wraps the schema into `json_schema`, the responses API does not."""

    type: str
    json_schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


def response_format(given: Format | None, field: str) -> pb.ResponseFormat | None:
    """The format for a start frame; None for plain text. field: the parameter that it stands in. Raises: InvalidRequest."""
    match given:
        case None | Format(type="text"):
            return None
        case Format(type="json_object"):
            return pb.ResponseFormat(json_schema=ANY_OBJECT)
        case Format(type="json_schema"):
            return pb.ResponseFormat(json_schema=bytes(_schema(given, field)).decode())
    raise wrong_parameter(f"{field}.type", "must be text, json_object or json_schema")


def _schema(given: Format, field: str) -> Raw:
    """The schema, from where this API has it. Raises: InvalidRequest."""
    wrapped = given.json_schema
    if field == CHAT_FIELD:
        if wrapped is None:
            raise wrong_parameter(f"{field}.json_schema", "is required: an object with name and schema")
        if bytes(given.schema) != bytes(ABSENT):
            raise wrong_parameter(f"{field}.schema", "belongs into json_schema: leave it out here")
    elif wrapped is not None:
        raise wrong_parameter(f"{field}.json_schema", "is the chat API's form: put name and schema beside type")
    schema, place = (given.schema, field) if wrapped is None else (wrapped.schema, f"{field}.json_schema")
    if bytes(schema) == bytes(ABSENT):
        raise wrong_parameter(f"{place}.schema", "is required")
    return schema


def as_given(given: Format | None) -> object:
    """The format as a reply repeats it."""
    if given is None:
        return {"type": "text"}
    fields = {"type": given.type, "name": given.name, "description": given.description, "strict": given.strict}
    told: dict[str, object] = {name: value for name, value in fields.items() if value is not None}
    if bytes(given.schema) != bytes(ABSENT):
        told["schema"] = msgspec.json.decode(given.schema)
    return told
