"""Provisioning checked by `scim2-tester`, a compliance checker of others.

It runs if `WEIR_TEST_SCIM2_TESTER_PYTHON` names its interpreter (`python -m infra.peers`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.service import Service

INSTALLED = os.environ.get("WEIR_TEST_SCIM2_TESTER_PYTHON", "")
pytestmark = pytest.mark.skipif(not INSTALLED, reason="scim2-tester is not installed")
SCRIPT = Path(__file__).parent / "scim_checker.py"
CHECK_MAX_S = 280.0


async def test_the_checker_of_others_finds_no_fault(service: Service) -> None:
    tenant = await service.tenant()
    _, secret = await service.new_key(tenant, "scim")
    url = f"{service.openai_url.removesuffix('/v1')}/scim/v2"

    checker = await asyncio.create_subprocess_exec(
        *(INSTALLED, SCRIPT, url, secret),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(CHECK_MAX_S):
            output, _ = await checker.communicate()
    finally:
        if checker.returncode is None:
            checker.kill()

    assert checker.returncode == 0, output.decode()
