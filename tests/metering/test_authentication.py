"""Invalid secrets: the same answer at the same cost, whatever the reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, func, update

from metering.core.errors import KeyInvalid
from metering.core.models import ApiKey
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key, revoke_api_key, rotate_api_key
from metering.tenants.authentication import authenticate, new_secret
from metering.tenants.tenants import create_organization, create_project


@pytest.fixture
async def secrets(sessions: Sessions) -> dict[str, str]:
    """Create one secret of each kind."""
    async with sessions.begin() as session:
        await create_organization(session, name="acme", actor="test")
        await create_project(session, organization="acme", name="main", actor="test")
        made = {}
        for name in ("good", "revoked", "expired", "replaced"):
            key, secret = await create_api_key(
                session, organization="acme", project="main", name=name, actor="test"
            )
            made[name] = secret
            if name == "revoked":
                await revoke_api_key(session, api_key=str(key.id), actor="test")
            elif name == "expired":
                ended = func.now() - timedelta(hours=1)
                await session.execute(
                    update(ApiKey).where(ApiKey.id == key.id).values(expires_at=ended)
                )
            elif name == "replaced":
                await rotate_api_key(
                    session, api_key=str(key.id), overlap=timedelta(0), actor="test"
                )
    prefix = made["good"][:11]
    return made | {"of a known prefix": new_secret(prefix), "unknown": new_secret()}


async def test_every_secret_is_answered_by_the_same_statement_and_the_same_words(
    sessions: Sessions, secrets: dict[str, str]
) -> None:
    seen: list[str] = []
    reported: dict[str, str] = {}
    async with sessions() as session:
        engine: Any = (await session.connection()).engine

        @event.listens_for(engine.sync_engine, "before_cursor_execute")
        def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            seen.append(statement)

        statements = {}
        for name, secret in secrets.items():
            seen.clear()
            try:
                await authenticate(session, secret)
            except KeyInvalid as refusal:
                reported[name] = str(refusal)
            statements[name] = tuple(seen)
        event.remove(engine.sync_engine, "before_cursor_execute", note)

    assert reported.keys() == secrets.keys() - {"good"}
    assert len(set(reported.values())) == 1
    assert len(set(statements.values())) == 1
    assert [len(each) for each in statements.values()] == [1] * len(secrets)
