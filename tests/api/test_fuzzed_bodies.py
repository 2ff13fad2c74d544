"""Random HTTP bodies and gRPC messages: parsed, or refused with an error of the API.

`WEIR_FUZZ_BODIES=1000000 python -m pytest tests/api/test_fuzzed_bodies.py -s` takes some minutes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import partial

from google.protobuf.message_factory import GetMessageClass

from api.core.errors import ApiError
from api.core.interceptor import LARGE_MESSAGES, is_costly
from api.core.statuses import status_of
from api.openai.error_responses import HttpFault, error_response
from api.openai.parameters import SHORT_BYTES_MAX
from tests.api.fuzzed_bodies import Bodies
from tests.api.test_growth import ERROR_CHARS_MAX, HTTP, METHODS, calling
from tests.growth import BLOCK_MAX_S, as_in_service, cpu_s

COUNT = int(os.environ.get("WEIR_FUZZ_BODIES", "4000"))
SEED = int(os.environ.get("WEIR_FUZZ_SEED", "1"))
RUNS_MAX = 5  # of a body that seems slow
STATUS_BYTES_MAX = 5000  # a client reads 8 KiB of metadata, in base64 and with the message again
REPORT_EVERY = 50_000


def fuzzed(seed: int = SEED) -> Bodies:
    """Return the fuzzed bodies of all entry points."""
    http = {path: (kind, plain) for path, (_, kind, plain) in HTTP.items()}
    return Bodies(http, {path: each.input_type for path, each in METHODS.items()}, seed)


def check_refusal(path: str, refusal: ApiError | HttpFault) -> str:
    """Check that a refusal becomes a short error that blames the caller; return its reason."""
    if isinstance(refusal, HttpFault):
        answer = refusal.refusal
    else:
        status = status_of(refusal)
        assert status.ByteSize() <= STATUS_BYTES_MAX, (path, status.message[:200])
        answer = error_response(status)
    assert 400 <= answer.http_status < 500, (path, refusal)
    assert 0 < len(answer.message) <= ERROR_CHARS_MAX, (path, answer.message[:200])
    return type(refusal).__name__


def test_random_bodies_and_messages_are_parsed_or_refused() -> None:
    bodies = fuzzed()
    entries = {path: enter for path, (enter, _, _) in HTTP.items()}
    entries |= {path: calling(path, method) for path, method in METHODS.items()}
    ends: Counter[tuple[str, str]] = Counter()
    slow: list[str] = []

    with as_in_service():
        for index in range(COUNT):
            path, data = bodies.body(index)
            enter = entries[path]
            began_at = time.thread_time()
            try:
                enter(data)
                end = "parsed"
            except (ApiError, HttpFault) as refusal:
                end = check_refusal(path, refusal)
            except Exception as error:
                raise AssertionError(f"{index}: {path}: {error!r} for {data[:2000]!r}") from error
            ends["HTTP" if path in HTTP else "gRPC", end] += 1
            if path in LARGE_MESSAGES:
                is_short = not is_costly(data, GetMessageClass(METHODS[path].input_type))
            else:
                is_short = path not in HTTP or len(data) <= SHORT_BYTES_MAX
            seems_slow = is_short and time.thread_time() - began_at > BLOCK_MAX_S
            if seems_slow and (
                min(cpu_s(partial(enter, data)) for _ in range(RUNS_MAX)) > BLOCK_MAX_S
            ):
                slow.append(f"{index}: {path}: {data[:200]!r}")
            if (index + 1) % REPORT_EVERY == 0:
                print(index + 1, f"{time.process_time():.0f} s", dict(ends), flush=True)

    print(dict(ends))
    assert slow == []
    assert ends["HTTP", "parsed"] > COUNT // 50
    assert ends["gRPC", "parsed"] > COUNT // 50


def test_a_body_is_the_same_for_its_seed_and_index() -> None:
    one, other = fuzzed(), fuzzed()

    assert [one.body(index) for index in range(200)] == [other.body(index) for index in range(200)]
