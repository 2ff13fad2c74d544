"""Verification of receipts: every changed bit is detected and named."""

from __future__ import annotations

import uuid
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from weir.v1 import receipts_pb2
from weir_client import (
    Fault,
    Receipt,
    ReceiptInvalid,
    ReceiptKey,
    ReceiptStep,
    ReceiptTimings,
    public_keys,
    verify_receipt,
    verify_receipts,
)
from weir_client.receipt_months import merkle_root, totals_of
from weir_client.receipts import (
    EPOCH,
    content_hash,
    end_user_hash,
    key_id_of,
    labels_hash,
    node,
    receipt_problems,
)
from weir_client.wire import receipt as receipt_of

ORGANIZATION, PROJECTS = str(uuid.UUID(int=1)), (str(uuid.UUID(int=2)), str(uuid.UUID(int=3)))
SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC_KEY = SIGNING_KEY.public_key().public_bytes_raw()
KEYS = {key_id_of(PUBLIC_KEY): PUBLIC_KEY}
NOVEMBER = (datetime(2026, 11, 15, tzinfo=UTC) - EPOCH).days * 86_400 * 10**6

FIELDS = st.sampled_from(
    [
        name
        for name in Receipt.__dataclass_fields__
        if name not in ("version", "path", "hash", "key_id", "signature", "timings")
        and not name.startswith(("end_user", "labels", "newer"))
    ]
)


def chain(project_id: str, count: int) -> list[Receipt]:
    """Return this many unsigned receipts of a project."""
    made: list[Receipt] = []
    for sequence in range(1, count + 1):
        made.append(
            resealed(
                Receipt(
                    organization_id=ORGANIZATION,
                    project_id=project_id,
                    api_key_id=str(uuid.UUID(int=4)),
                    request_id=str(uuid.UUID(int=sequence * 1000)),
                    part=0,
                    input_token_count=100 + sequence,
                    cached_input_token_count=sequence,
                    billed_token_count=20,
                    embedding_token_count=0,
                    price_version=7,
                    cost_picos=10**9 + sequence,
                    admitted_at_us=NOVEMBER,
                    settled_at_us=NOVEMBER + sequence,
                    sequence=sequence,
                    previous_hash=made[-1].hash if made else bytes(32),
                    currency_code="USD",
                    model="demo",
                    outcome="stop",
                    hash=b"",
                    reasoning_token_count=0 if sequence % 2 else 8,
                )
            )
        )
    return made


def named(receipt: Receipt) -> Receipt:
    """Return the receipt with an end user and labels, proven by their salts."""
    salts, labels = (bytes([1] * 32), bytes([2] * 32)), {"größe": "m", "team": "search"}
    return resealed(
        replace(
            receipt,
            end_user="user-4711",
            end_user_salt=salts[0],
            end_user_hash=end_user_hash(salts[0], "user-4711"),
            labels=labels,
            labels_salt=salts[1],
            labels_hash=labels_hash(salts[1], labels),
        )
    )


def resealed(receipt: Receipt) -> Receipt:
    """Return the receipt with the hash of its content."""
    return replace(receipt, hash=content_hash(receipt) or b"")


def signed(receipt: Receipt) -> Receipt:
    """Return the receipt with a signature of its own."""
    signature = SIGNING_KEY.sign(b"weir.receipt.batch.v1\n" + receipt.hash)
    return replace(receipt, key_id=key_id_of(PUBLIC_KEY), signature=signature, path=())


def signed_pair(left: Receipt, right: Receipt) -> list[Receipt]:
    """Return two receipts that share a signature."""
    signature = SIGNING_KEY.sign(b"weir.receipt.batch.v1\n" + node(left.hash, right.hash))
    paths = (ReceiptStep(False, right.hash),), (ReceiptStep(True, left.hash),)
    key_id = key_id_of(PUBLIC_KEY)
    return [
        replace(each, key_id=key_id, signature=signature, path=path)
        for each, path in zip((left, right), paths, strict=True)
    ]


def month() -> list[Receipt]:
    """Return receipts of two projects, one of them unsigned."""
    one, two, three, four = chain(PROJECTS[0], 4)
    return [*signed_pair(one, two), three, signed(four), *map(signed, chain(PROJECTS[1], 2))]


def faults(receipts: list[Receipt], **more: object) -> set[Fault]:
    """Return the faults that are found in the receipts as the whole of November."""
    verdict = verify_receipts(receipts, KEYS, month="2026-11", **more)  # type: ignore[arg-type]
    return {problem.fault for problem in verdict.problems}


def test_a_whole_month_verifies_in_any_order() -> None:
    receipts = month()

    verdict = verify_receipts(
        reversed(receipts),
        KEYS,
        month="2026-11",
        organization_id=ORGANIZATION,
        root=merkle_root([receipt.hash for receipt in receipts]),
        totals=totals_of(receipts),
    )

    assert verdict.problems == ()
    assert verdict.valid
    assert (verdict.receipt_count, verdict.signed_count, verdict.project_count) == (6, 5, 2)
    assert verdict.key_ids == tuple(KEYS)


def test_a_single_receipt_verifies_or_names_the_fault() -> None:
    receipt = month()[0]

    verify_receipt(receipt, KEYS)

    for wrong, fault in (
        (replace(receipt, cost_picos=0), Fault.ALTERED),
        (replace(receipt, request_id="no uuid"), Fault.ALTERED),
        (replace(receipt, part=2**63), Fault.ALTERED),
        (replace(receipt, signature=bytes(64)), Fault.SIGNATURE_WRONG),
        (replace(receipt, path=()), Fault.SIGNATURE_WRONG),
        (replace(receipt, key_id="0" * 16), Fault.KEY_UNKNOWN),
        (replace(receipt, key_id=""), Fault.NOT_SIGNED),
    ):
        with pytest.raises(ReceiptInvalid) as refused:
            verify_receipt(wrong, KEYS)
        assert refused.value.problem.fault is fault


@given(st.integers(0, 5), FIELDS, st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_any_changed_bit_of_any_field_is_caught_and_named(index: int, field: str, bit: int) -> None:
    receipts = month()
    was = getattr(receipts[index], field)
    if isinstance(was, int):
        now: object = was ^ (1 << bit % 62)
    elif isinstance(was, bytes):
        now = (int.from_bytes(was, "big") ^ (1 << bit)).to_bytes(32, "big")
    elif field.endswith("_id"):
        now = str(uuid.UUID(int=uuid.UUID(was).int ^ (1 << bit % 128)))
    else:
        at = bit % len(was)
        now = was[:at] + chr(ord(was[at]) ^ 1) + was[at + 1 :]
    receipts[index] = replace(receipts[index], **{field: now})  # type: ignore[arg-type]

    problems = [
        str(problem)
        for problem in verify_receipts(receipts, KEYS).problems
        if problem.fault is Fault.ALTERED
    ]

    assert len(problems) == 1
    # No other receipt has its correct value.
    if field not in ("request_id", "cost_picos", "settled_at_us"):
        assert f"{field} is " in problems[0]


@given(st.integers(0, 5), st.integers(0, 511))
@settings(max_examples=15, deadline=None)
def test_any_changed_bit_of_hash_signature_or_path_is_caught(index: int, bit: int) -> None:
    good = month()
    receipt = good[index]
    changed: list[Receipt] = [replace(receipt, hash=flipped(receipt.hash, bit % 256))]
    if receipt.signature:
        changed.append(replace(receipt, signature=flipped(receipt.signature, bit)))
    if receipt.path:
        [step] = receipt.path
        changed += [
            replace(receipt, path=(replace(step, hash=flipped(step.hash, bit % 256)),)),
            replace(receipt, path=(replace(step, on_left=not step.on_left),)),
        ]
    for wrong in changed:
        assert not verify_receipts([*good[:index], wrong, *good[index + 1 :]], KEYS).valid


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit changed."""
    return (int.from_bytes(data, "big") ^ (1 << bit)).to_bytes(len(data), "big")


@pytest.mark.parametrize(
    ("removed", "message"), [(1, "gap: receipt 2 is missing"), (2, "gap: receipt 3 is missing")]
)
def test_a_missing_receipt_is_a_gap(removed: int, message: str) -> None:
    receipts = month()
    del receipts[removed]

    verdict = verify_receipts(receipts, KEYS, month="2026-11")

    assert [problem.message for problem in verdict.problems] == [
        f"{message} of project {PROJECTS[0]}"
    ]
    assert verify_receipts(receipts, KEYS).valid, "single receipts need not be complete"


def test_missing_receipts_at_the_ends_show_in_root_and_sums() -> None:
    receipts = month()
    root, totals = merkle_root([receipt.hash for receipt in receipts]), totals_of(receipts)

    assert faults(receipts[:-1], root=root) == {Fault.ROOT_DIFFERS}
    assert faults(receipts[:-1], totals=totals) == {Fault.TOTALS_DIFFER}
    assert faults([], root=root, totals=totals) == {Fault.ROOT_DIFFERS, Fault.TOTALS_DIFFER}


def test_two_receipts_for_one_position_are_a_fork() -> None:
    """A server that was restored from a backup makes them, or a dishonest one."""
    receipts = month()
    other = signed(resealed(replace(receipts[-1], request_id=str(uuid.UUID(int=99)))))

    verdict = verify_receipts([*receipts, other], KEYS, month="2026-11")

    assert [problem.fault for problem in verdict.problems] == [Fault.FORK]
    assert str(uuid.UUID(int=99)) in verdict.problems[0].message
    assert faults([*receipts, receipts[-1]]) == {Fault.REPEATED}


def test_a_replaced_receipt_breaks_the_chain_though_it_is_signed() -> None:
    receipts = month()
    receipts[1] = signed(resealed(replace(receipts[1], billed_token_count=1)))

    assert faults(receipts) == {Fault.NOT_NEXT}


def test_other_months_customers_and_times_are_shown() -> None:
    receipts = month()
    october = signed(resealed(replace(receipts[-1], settled_at_us=NOVEMBER - 20 * 86_400 * 10**6)))
    stranger = signed(resealed(replace(receipts[-1], organization_id=str(uuid.UUID(int=9)))))

    assert faults([*receipts[:-1], october]) == {Fault.OTHER_MONTH, Fault.TIME_BACK}
    assert faults([*receipts[:-1], stranger]) == {Fault.OTHER_ORGANIZATION}


def test_an_unsigned_receipt_needs_a_signed_successor() -> None:
    receipts = [replace(receipt, key_id="", signature=b"", path=()) for receipt in month()]

    assert faults(receipts) == {Fault.NOT_SIGNED}
    assert faults(receipts, root=merkle_root([receipt.hash for receipt in receipts])) == set()
    assert faults([*receipts[:3], *month()[3:]]) == set(), (
        "the fourth vouches for the three before it"
    )


def test_a_chain_begins_with_one() -> None:
    [first] = chain(PROJECTS[0], 1)

    for wrong in (
        replace(first, sequence=0),
        replace(first, sequence=2),
        replace(first, previous_hash=bytes([1] * 32)),
    ):
        assert Fault.NOT_NEXT in {
            problem.fault for problem in verify_receipts([signed(resealed(wrong))], KEYS).problems
        }


def test_sums_that_differ_name_model_price_and_kind() -> None:
    receipts = month()
    totals = totals_of(receipts) | {("demo", "7", "output"): 97, ("demo", "7", "reasoning"): 25}

    verdict = verify_receipts(receipts, KEYS, month="2026-11", totals=totals)

    assert [str(problem) for problem in verdict.problems] == [
        "demo, price version 7: the receipts add up to 96 output tokens, the report says 97",
        "demo, price version 7: the receipts add up to 24 reasoning tokens, the report says 25",
    ]


def test_a_key_must_be_what_its_id_says() -> None:
    assert public_keys([ReceiptKey(key_id_of(PUBLIC_KEY), PUBLIC_KEY)]) == KEYS
    with pytest.raises(ValueError, match="does not match its id"):
        public_keys([ReceiptKey("0" * 16, PUBLIC_KEY)])


def test_receipts_survive_json() -> None:
    for receipt in [*month(), *map(named, month())]:
        assert Receipt.from_json(receipt.to_json()) == receipt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a receipt is a JSON object"),
        ("{}", "version: None is not 1"),
        ('{"version": 5}', "version: 5 is not 1, 2, 3 or 4, .* update it"),
        ('{"version": 4}', "organization_id: None is not a string"),
        ('{"version": 3}', "organization_id: None is not a string"),
        ('{"version": 2}', "organization_id: None is not a string"),
        ('{"version": 1}', "organization_id: None is not a string"),
        ("no json", "Expecting value"),
    ],
)
def test_invalid_receipts_are_refused_by_field(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Receipt.from_json(text)


@pytest.mark.parametrize(
    ("change", "fault", "message"),
    [
        ({"end_user": "user-4712"}, Fault.END_USER_DIFFERS, "is not for end_user 'user-4712'"),
        ({"end_user": ""}, Fault.END_USER_DIFFERS, "is not for end_user ''"),
        ({"end_user_salt": bytes(32)}, Fault.END_USER_DIFFERS, "the name or its salt was altered"),
        ({"labels": {"team": "search"}}, Fault.LABELS_DIFFER, "{'team': 'search'}: one of them"),
        ({"labels": {"größe": "m", "team": "x"}}, Fault.LABELS_DIFFER, "'team': 'x'}: one of them"),
        ({"labels": {"\ud800": ""}}, Fault.LABELS_DIFFER, "one of them or their salt"),
        ({"labels": {}}, Fault.LABELS_DIFFER, "does not have labels {}"),
        ({"labels_salt": b""}, Fault.LABELS_DIFFER, "or their salt was altered"),
        ({"end_user_hash": bytes(32)}, Fault.ALTERED, "does not match its hash"),
        ({"labels_hash": b""}, Fault.ALTERED, "does not match its hash"),
        ({"labels_hash": b"short"}, Fault.ALTERED, "does not match its hash"),
    ],
)
def test_an_altered_end_user_or_label_is_named(
    change: dict[str, Any], fault: Fault, message: str
) -> None:
    [receipt] = map(signed, map(named, chain(PROJECTS[0], 1)))
    verify_receipt(receipt, KEYS)

    problems = {
        each.fault: str(each)
        for each in verify_receipts([replace(receipt, **change)], KEYS, month="2026-11").problems
    }

    assert message in problems[fault]
    assert fault is Fault.ALTERED or len(problems) == 1
    with pytest.raises(ReceiptInvalid):
        verify_receipt(replace(receipt, **change), KEYS)


def test_a_receipt_of_a_newer_version_is_reported_as_one() -> None:
    """It was not altered."""
    message = receipts_pb2.Receipt(version=5, sequence=1, hash=bytes(32))

    receipt = receipt_of(message)

    for found in (
        list(receipt_problems(receipt, KEYS)),
        [each for each in verify_receipts([receipt], KEYS).problems if "version" in str(each)],
    ):
        assert [each.fault for each in found] == [Fault.VERSION_UNKNOWN]
        assert str(found[0]).endswith("has version 5, and this client knows 1 to 4: update it")
    with pytest.raises(ValueError, match="version: 5 is not 1, 2, 3 or 4"):
        Receipt.from_json(receipt.to_json())
    assert not verify_receipts([receipt], KEYS).valid


def test_a_receipt_with_hashes_only_verifies() -> None:
    """A server may hide the names, and they may be erased."""
    [receipt] = map(signed, map(named, chain(PROJECTS[0], 1)))

    nameless = replace(receipt, end_user="", end_user_salt=b"", labels={}, labels_salt=b"")

    verify_receipt(nameless, KEYS)
    assert nameless.hash == receipt.hash
    assert "4711" not in nameless.to_json()
    assert Receipt.from_json(nameless.to_json()) == nameless
    assert "version" not in {field.name for field in fields(nameless)}
    assert nameless.version == 4


def test_fields_of_the_wrong_kind_are_refused_by_name() -> None:
    line = month()[0].to_json()

    for wrong, message in (
        (line.replace('"part":0', '"part":"0"'), "part: '0' is not a number"),
        (line.replace('"part":0', '"part":true'), "part: True is not a number"),
        (line.replace('"path":["R', '"path":["X'), "path: "),
        (line.replace('"signature":"', '"signature":"zz'), "signature: .* is not hexadecimal"),
        (line.replace('"part":0', '"part":0,"bonus":1'), "bonus: no such field"),
        (
            line.replace('"part":0', '"part":0,"reasoning_token_count":1'),
            "reasoning_token_count: no such field in a receipt of version 1",
        ),
        (
            line.replace('"version":1', '"version":2'),
            "reasoning_token_count: None is not a number",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Receipt.from_json(wrong)


def timed(receipt: Receipt, **changes: int) -> Receipt:
    """Return the receipt with timings, signed."""
    times = ReceiptTimings(48_100, 61_200, 15_900, 31_000, 33_400, 200)
    return signed(resealed(replace(receipt, timings=replace(times, **changes))))


@pytest.mark.parametrize("name", [field.name for field in fields(ReceiptTimings)])
def test_changed_timings_are_caught(name: str) -> None:
    receipt = timed(month()[0])
    assert receipt.timings is not None
    verify_receipt(receipt, KEYS)
    assert Receipt.from_json(receipt.to_json()) == receipt

    other = replace(receipt.timings, **{name: getattr(receipt.timings, name) + 1})
    for wrong in (replace(receipt, timings=other), replace(receipt, timings=None)):
        with pytest.raises(ReceiptInvalid, match="altered"):
            verify_receipt(wrong, KEYS)
    line = receipt.to_json()
    number = f'"{name}":{getattr(receipt.timings, name)}'
    for text, message in (
        (line.replace(number, f'"{name}":1.5'), f"timings.{name}: 1.5 is not a number"),
        (line.replace(number, f'"other":{name!r}'.replace("'", '"')), "timings: must be an object"),
        (line.replace('"version":3', '"version":1'), "no such field in a receipt of version 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Receipt.from_json(text)


@pytest.mark.parametrize("name", ["billed_token_count", "reasoning_token_count", "price_version"])
def test_an_altered_number_beside_timings_is_named(name: str) -> None:
    receipt = timed(replace(month()[0], price_version=9, reasoning_token_count=3))
    wrong = replace(receipt, **{name: getattr(receipt, name) + 1})

    [problem] = verify_receipts([wrong], KEYS).problems

    was = getattr(receipt, name)
    assert str(problem).endswith(f"was altered: {name} is {was + 1}, originally {was}")


def test_a_chain_may_have_receipts_of_every_version() -> None:
    one, two, *_ = chain(PROJECTS[0], 3)
    three = timed(replace(chain(PROJECTS[0], 3)[2], previous_hash=two.hash))
    verdict = verify_receipts([signed(one), signed(two), three], KEYS, month="2026-11")

    assert [one.version, two.version, three.version] == [1, 2, 3]
    assert not verdict.problems
