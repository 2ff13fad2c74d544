"""Reports that operators send to others: no secrets, paths or addresses."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from common.scrubbing import Scrubber

ENVIRONMENT = {
    "WEIR_DATABASE_URL": "postgresql://weir:hunter22@db.internal/weir",
    "WEIR_PASSWORD": "correcthorse",
    "SOME_NAME": "Xy9/abcdef-secret",
    "WEIR_ENGINE": "tensorrt",
    "PATH": "/usr/bin",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot reach postgresql://weir:hunter22@db.internal/weir", "[WEIR_DATABASE_URL]"),
        ("the password correcthorse is wrong", "the password [WEIR_PASSWORD] is wrong"),
        ("Xy9/abcdef-secret", "[SOME_NAME]"),
        ("tensorrt on GPUs 0,1", "tensorrt on GPUs 0,1"),
        ("https://user:pass@host:80/v1", "https://host:80/v1"),
        ("401 for sk-abcdefgh12345678", "401 for [removed]"),
        ("hf_abcdefghijklmn", "[removed]"),
        ("no file '/data/ann/models/llama/config.json'", "no file 'config.json'"),
        ("lost 10.0.0.5:50051", "lost [address]:50051"),
        ("the server large at acme-secret", "the server large at [server]"),
        ("vllm://acme-secret:1", "vllm://[server]:1"),
        (socket.gethostname(), "[host]"),
        ("1.2.1, 3/4 of 5 and/or", "1.2.1, 3/4 of 5 and/or"),
    ],
)
def test_what_a_text_may_show(text: str, expected: str) -> None:
    found = Scrubber({"acme-secret": "[server]"}, ENVIRONMENT).text(text)

    assert found == expected or expected in found
    assert not any(each in found for each in ("hunter22", "correcthorse", "/ann/", "-secret"))


def test_values_are_removed_by_their_names() -> None:
    value: dict[str, Any] = {
        "api_key": "plain",
        "max_num_tokens": 8192,
        "auth": {"password": "plain", "more": ["hf_abcdefghijklmn", 1, None, True]},
        "tokens_per_block": 32,
    }

    assert Scrubber(environment={}).json(value) == {
        "api_key": "[removed]",
        "max_num_tokens": 8192,
        "auth": {"password": "[removed]", "more": ["[removed]", 1, None, True]},
        "tokens_per_block": 32,
    }
