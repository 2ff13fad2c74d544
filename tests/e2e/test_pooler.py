"""A service behind the real PgBouncer, whose role has other defaults than Weir relies on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from grpc import StatusCode
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text

from metering.core.errors import DatabaseUnavailable
from metering.proof.fsck import CHECKS, fsck
from metering.store.db import create_engine, create_sessions, psycopg_conninfo
from metering.store.embedded_postgres import server_account
from tests.conftest import ask, close_kept, new_database, new_home, remove_home
from tests.faults.billed import rate
from tests.inference.real_servers import free_port
from tests.inference.real_servers import running as running_server
from tests.service import Service, running

SHOWN = text("SELECT current_setting(name) FROM unnest(CAST(:names AS text[])) AS s (name)")
RELIED_ON = {
    "default_transaction_isolation": "read committed",
    "statement_timeout": "10s",
    "synchronous_commit": "on",
}
DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "statement_timeout": "0",
    "synchronous_commit": "off",
}


@pytest.fixture(scope="module")
def pgbouncer() -> str:
    """Return PgBouncer's program, which is a package of the system."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        if os.environ.get("WEIR_REQUIRE_PGBOUNCER") == "1":
            pytest.fail("pgbouncer is not installed, and WEIR_REQUIRE_PGBOUNCER=1 asks for it")
        pytest.skip("pgbouncer is not installed")
    return program


@pytest.fixture(scope="module")
def database(postgres_server: str, template_database: str) -> Iterator[str]:
    """Yield the URL of a database in which the role has its own defaults."""
    with new_database(postgres_server, template=template_database) as url:
        name = conninfo_to_dict(psycopg_conninfo(url))["dbname"]
        for setting, value in DEFAULTS.items():
            ask(url, f"ALTER ROLE CURRENT_USER IN DATABASE {name} SET {setting} = '{value}'")
        close_kept(url)
        yield url


@pytest.fixture(scope="module")
def poolers(pgbouncer: str, database: str) -> Iterator[dict[str, str]]:
    """Yield URLs of the database by what its pooler ignores: `options`, or nothing."""
    named = conninfo_to_dict(psycopg_conninfo(database))
    home = new_home()
    home.chmod(0o755)
    urls = {}
    account = server_account()
    with ExitStack() as stack:
        stack.callback(remove_home, home)
        for ignored in ("options", ""):
            port = free_port()
            settings = {
                "listen_addr": "127.0.0.1",
                "listen_port": port,
                "unix_socket_dir": "",
                "auth_type": "any",
                "pool_mode": "session",
                "ignore_startup_parameters": ignored,
                **({"user": account.pw_name} if account is not None else {}),
            }
            path = home / f"{ignored or 'nothing'}.ini"
            path.write_text(
                f"[databases]\n{named['dbname']} = host={named['host']} user={named['user']}\n"
                "[pgbouncer]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
            )
            stack.enter_context(
                running_server([pgbouncer, str(path)], path.with_suffix(".log"), "process up")
            )
            urls[ignored] = f"postgresql://{named['user']}@127.0.0.1:{port}/{named['dbname']}"
        yield urls


async def test_a_pooler_does_not_take_a_setting_away(poolers: dict[str, str]) -> None:
    """The second session gets the server connection of the first one, whose settings are reset."""
    found = []
    for _ in range(2):
        engine = create_engine(poolers["options"], pool_size=1)
        async with create_sessions(engine)() as session:
            shown = await session.scalars(SHOWN, {"names": list(RELIED_ON)})
            found.append(dict(zip(RELIED_ON, shown, strict=True)))
        await engine.dispose()

    assert found == [RELIED_ON] * 2


async def test_a_pooler_that_refuses_the_settings_is_named(poolers: dict[str, str]) -> None:
    engine = create_engine(poolers[""])
    with pytest.raises(DatabaseUnavailable, match="ignore_startup_parameters = options"):
        async with create_sessions(engine)() as session:
            await session.execute(text("SELECT 1"))
    await engine.dispose()


async def test_a_service_behind_a_pooler_admits_bills_and_hears_of_revoked_keys(
    poolers: dict[str, str], database: str, model: Path, tmp_path: Path
) -> None:
    service = Service(tmp_path, poolers["options"], model, engine_device="simulated")
    with running(service):
        tenant = await service.tenant()
        async with service.stream(tenant.secret) as stream:
            finished = await stream.finished(await stream.begin())
            running_id = await stream.begin(max_output_tokens=3000)
            await stream.received(running_id, 5)
            await service.revoke(tenant.key)
            refusal = await stream.failed(running_id)
    await rate(service)

    assert finished.usage.billed_token_count == 20
    assert refusal.code is StatusCode.UNAUTHENTICATED
    assert "held" not in service.database.holds(tenant)
    assert not [each for each in fsck(database, CHECKS) if each.violation_count]
