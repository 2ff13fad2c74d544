"""Lists of the contract have pages, or a reason why they are short; pages are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from hypothesis import given
from hypothesis import strategies as st
from weir.v1 import (
    admin_service_pb2,
    billing_service_pb2,
    inference_service_pb2,
    receipt_service_pb2,
)

from api.access import pages
from api.access.pages import CHUNK_ROWS, as_it_is, fitting_in, read_page
from metering.core.errors import InvalidValue
from metering.core.pages import PAGE_SIZE_MAX

SERVICES = (
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
    billing_service_pb2.DESCRIPTOR.services_by_name["BillingService"],
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    receipt_service_pb2.DESCRIPTOR.services_by_name["ReceiptService"],
)
# Lists without pages, with the reason why their answers stay small.
BOUNDED = {
    "ListConcerns": "one row for each kind of concern",
    "ListFleetVersions": "pages end at a version: `page_size` and `before_number`, no documents",
    "ListLiveRequests": "at most `page_size`, the oldest, with the number of all",
    "ListModels": "the models in the configuration of the server",
    "ListMonths": "twelve a year, of one organization",
    "ListPrices": "prices that the operator set one by one; `model` selects fewer",
    "ListReceiptKeys": "a key for each time that the operator replaced it",
    "ListReplicas": "the engines that run now",
}


def lists() -> Iterator[MethodDescriptor]:
    """Yield the calls that return lists of messages."""
    for service in SERVICES:
        for method in service.methods:
            fields = method.output_type.fields
            if method.name.startswith("List") and any(
                each.is_repeated and each.message_type for each in fields
            ):
                yield method


def lacks(method: MethodDescriptor) -> str:
    """Name what a call lacks of pages; empty if it has them."""
    wanted = (
        (method.input_type, "page_size", FieldDescriptor.TYPE_INT32),
        (method.input_type, "page_token", FieldDescriptor.TYPE_STRING),
        (method.output_type, "next_page_token", FieldDescriptor.TYPE_STRING),
    )
    missing = [
        f"{message.name}.{name}"
        for message, name, kind in wanted
        if (field := message.fields_by_name.get(name)) is None or field.type != kind
    ]
    return ", ".join(missing)


def test_every_list_has_pages_or_a_reason_why_it_is_short() -> None:
    """A new list needs `page_size`, `page_token` and `next_page_token`, or a row in `BOUNDED`."""
    without = {method.name: lacks(method) for method in lists() if lacks(method)}

    assert set(without) == set(BOUNDED), without
    assert lacks(SERVICES[0].methods_by_name["ListApiKeys"]) == ""
    assert lacks(SERVICES[2].methods_by_name["ListModels"]).count("page") == 3, "a planted fault"


class Rows:
    """List of keys whose names have these lengths, with the numbers of rows that were requested."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.keys = [
            admin_service_pb2.ApiKey(prefix=str(number), name="x" * size)
            for number, size in enumerate(sizes)
        ]
        self.requested: list[int] = []

    async def query(self, *, page_size: int, page_token: str) -> tuple[list[Any], str]:
        self.requested.append(page_size)
        start = int(page_token or 0)
        end = start + page_size
        return self.keys[start:end], str(end) if end < len(self.keys) else ""

    async def page(self, page_size: int, page_token: str = "", **limits: int) -> tuple[Any, str]:
        messages, following = await read_page(
            self.query, as_it_is, page_size=page_size, page_token=page_token, **limits
        )
        return admin_service_pb2.ListApiKeysResponse(api_keys=messages), following


@given(
    sizes=st.lists(st.integers(0, 400), max_size=300),
    page_size=st.integers(1, 120),
    bytes_max=st.integers(1, 2000),
)
def test_pages_have_every_record_once_and_no_more_bytes_than_allowed(
    sizes: list[int], page_size: int, bytes_max: int
) -> None:
    rows, found, token = Rows(sizes), [], ""

    while True:
        page, token = asyncio.run(rows.page(page_size, token, bytes_max=bytes_max))
        assert len(page.api_keys) <= page_size
        assert page.ByteSize() <= bytes_max or len(page.api_keys) == 1
        assert page.api_keys or not token, "a client would never reach the end"
        found += page.api_keys
        if not token:
            break

    assert found == rows.keys
    assert max(rows.requested) <= CHUNK_ROWS


async def test_a_list_without_a_page_size_is_whole_or_refused() -> None:
    """Clients that know no pages get everything, and never a part of it."""
    rows = Rows([20] * (2 * CHUNK_ROWS + 1))
    whole, token = await rows.page(0)
    size = whole.ByteSize()

    assert (len(whole.api_keys), token) == (len(rows.keys), "")
    assert (await rows.page(0, bytes_max=size))[0] == whole
    with pytest.raises(InvalidValue, match=f"page_size: is required.*set 1 to {PAGE_SIZE_MAX}"):
        await rows.page(0, bytes_max=size - 1)


@pytest.mark.parametrize("page_size", [-1, PAGE_SIZE_MAX + 1])
async def test_other_page_sizes_are_refused_before_anything_is_read(page_size: int) -> None:
    rows = Rows([1])

    with pytest.raises(InvalidValue, match="page_size: must be between 1 and"):
        await rows.page(page_size)

    assert rows.requested == []


async def test_other_tasks_run_between_the_chunks_of_a_page() -> None:
    turns: list[int] = []
    rows = Rows([1] * PAGE_SIZE_MAX)

    async def count() -> None:
        while True:
            turns.append(len(rows.requested))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await rows.page(PAGE_SIZE_MAX)
    counting.cancel()

    assert set(range(1, PAGE_SIZE_MAX // CHUNK_ROWS)) <= set(turns)


def test_the_size_of_an_answer_includes_tags_and_lengths() -> None:
    for sizes in ([], [0], [1] * 3, [200] * 3, [20_000]):
        keys = Rows(sizes).keys
        exact = admin_service_pb2.ListApiKeysResponse(api_keys=keys).ByteSize()

        assert fitting_in(keys, exact) == (len(keys), exact)
        if keys:
            assert fitting_in(keys, exact - 1)[0] == len(keys) - 1


def test_a_page_leaves_room_for_the_longest_token() -> None:
    assert pages.ANSWER_BYTES_MAX - pages.RECORD_BYTES_MAX > 4000 + 4
