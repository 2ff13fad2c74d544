"""Export of an organization: complete, exact, of one moment, within its border, bounded."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import tracemalloc
import uuid
import zipfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from weir_cli.exports import BadArchive, summary_of

from metering.reports.organization_export import write_export
from metering.store.border import SCHEMA, Actor, acting
from metering.store.db import Sessions, create_engine, create_sessions, psycopg_conninfo
from metering.tenants.tenants import find_organization
from tests.conftest import as_application
from tests.metering.test_border import ACME, BOLT, OF_ALL, ROWS, relations

SECRETS = {
    ("api_keys", "secret_hash"),
    ("superseded_secrets", "secret_hash"),
    ("alert_webhooks", "secret"),
    ("client_tokens", "secret_hash"),
    ("invitations", "token_hash"),
    ("sign_in_links", "secret_hash"),
    ("sign_in_sessions", "secret_hash"),
}
PDF = b"%PDF-1.7 an invoice"
# Tables of the service, whose views show no organization anything.
NO_ROWS = (
    "SELECT viewname FROM pg_views WHERE schemaname = %s AND definition LIKE '%%WHERE false%%'"
)


@pytest.fixture
def database(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection to a database with rows of two organizations in every older table."""
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute(ROWS.read_bytes())
        connection.execute(
            "INSERT INTO issued_documents (organization_id, name, issuer, pdf, pdf_sha256)"
            " VALUES (%s, '2026-01', '{}', %s, sha256(%s))",
            [ACME, PDF, PDF],
        )
        connection.execute(
            "INSERT INTO audit_log (actor, action, subject_id, after)"
            """ VALUES ('ann', 'quota.set', %s, '{"limit_value": 9007199254740993}')""",
            [str(ACME)],
        )
        yield connection


@pytest.fixture(params=["owner", "application"])
async def sessions(
    database: psycopg.Connection[Any], database_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Sessions]:
    """Sessions of the owner of the tables, a superuser, and of the application role."""
    is_owner = request.param == "owner"
    engine = create_engine(database_url if is_owner else as_application(database_url))
    yield create_sessions(engine)
    await engine.dispose()


async def export(
    sessions: Sessions, organization_id: uuid.UUID, file: Any = None
) -> zipfile.ZipFile:
    file = io.BytesIO() if file is None else file
    async with sessions() as session:
        owner = await find_organization(session, str(organization_id))
    async with acting(sessions, Actor("owner", organization_id, is_bound=True))() as session:
        await write_export(session, owner, file)
    return zipfile.ZipFile(file)


def rows_of(archive: zipfile.ZipFile, table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(f"tables/{table}.jsonl").splitlines()]


def differences(
    database: psycopg.Connection[Any],
    organization_id: uuid.UUID,
    table: str,
    rows: list[dict[str, Any]],
    left_out: set[str],
) -> int:
    """Count the rows that only the export has, or only the border, as PostgreSQL reads both."""
    columns = [
        name
        for (name,) in database.execute(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
            " AND NOT attisdropped",
            [f"public.{table}"],
        )
        if name not in left_out
    ]
    assert all({*row} == {*columns} for row in rows), table
    listed = ", ".join(f'"{name}"' for name in columns)
    exported = f'SELECT {listed} FROM jsonb_populate_recordset(NULL::public."{table}", %(rows)s)'
    within = f'SELECT {listed} FROM {SCHEMA}."{table}"'
    query = (
        f"SELECT (SELECT count(*) FROM ({exported} EXCEPT ALL {within}) AS more)"
        f" + (SELECT count(*) FROM ({within} EXCEPT ALL {exported}) AS fewer)"
    )
    with database.transaction():
        database.execute(Actor("owner", organization_id, is_bound=True).settings.encode())
        [(count,)] = database.execute(query.encode(), {"rows": Jsonb(rows)}).fetchall()
    return int(count)


def sortable(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def exported_tables(database: psycopg.Connection[Any]) -> set[str]:
    """Return the tables that have a view, which is what the test of the border demands."""
    kinds = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
    views = {name for (name,) in database.execute(f"{kinds} AND relkind = 'v'".encode())}
    return (relations(database, "public") & relations(database, SCHEMA)) - views


async def test_the_export_has_every_row_of_every_table_of_the_border(
    database: psycopg.Connection[Any], sessions: Sessions
) -> None:
    found_count = 0
    for organization_id in (ACME, BOLT):
        archive = await export(sessions, organization_id)
        files = {each["table"] for each in manifest(archive)["files"] if "table" in each}
        assert files == exported_tables(database)
        for table in files:
            rows = rows_of(archive, table)
            left_out = {name for of, name in (*SECRETS, ("issued_documents", "pdf")) if of == table}
            assert differences(database, organization_id, table, rows, left_out) == 0, table
            if rows:
                one_less = differences(database, organization_id, table, rows[1:], left_out)
                assert one_less == 1, "a comparison that finds nothing proves nothing"
            found_count += len(rows)
    assert found_count > 80, "a walk that finds nothing proves nothing"


def manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(archive.read("manifest.json"))
    return content


async def test_two_exports_share_no_row_and_have_all_together(
    database: psycopg.Connection[Any], sessions: Sessions
) -> None:
    archives = [await export(sessions, each) for each in (ACME, BOLT)]
    no_rows = {name for (name,) in database.execute(NO_ROWS, [SCHEMA])}

    for table in exported_tables(database) - OF_ALL - no_rows:
        one, other = ({sortable(row) for row in rows_of(each, table)} for each in archives)
        assert not one & other, table
        [(count,)] = database.execute(f'SELECT count(*) FROM "{table}"'.encode()).fetchall()
        # One entry of these rows names no owner; those of the product do.
        of_none = 1 if table == "audit_log" else 0
        assert len(one) + len(other) + of_none == count, table


async def test_amounts_are_exact_and_documents_are_files(
    database: psycopg.Connection[Any], sessions: Sessions
) -> None:
    archive = await export(sessions, ACME)

    assert archive.read("documents/2026-01.pdf") == PDF
    [changed] = [row for row in rows_of(archive, "audit_log") if row["actor"] == "ann"]
    assert changed["after"]["limit_value"] == 9007199254740993
    amounts = [row["amount_picos"] for row in rows_of(archive, "ledger_entries")]
    assert amounts
    assert all(isinstance(each, str) and str(int(each)) == each for each in amounts)
    about = manifest(archive)
    assert about["organization"] == {"id": str(ACME), "name": "acme"}
    assert about["exported_at"].endswith("+00:00")
    [revision] = database.execute("SELECT version_num FROM alembic_version").fetchall()
    assert (about["schema_revision"],) == revision
    assert summary_of(archive)["document_count"] == 1


async def test_no_secret_is_exported(database: psycopg.Connection[Any], sessions: Sessions) -> None:
    hashes = [
        row[0].hex() for row in database.execute("SELECT secret_hash FROM api_keys").fetchall()
    ]
    secrets = [row[0] for row in database.execute("SELECT secret FROM alert_webhooks").fetchall()]
    assert hashes
    assert secrets
    for organization_id in (ACME, BOLT):
        archive = await export(sessions, organization_id)
        content = b"".join(map(archive.read, archive.namelist())).decode(errors="replace")
        assert [each for each in (*hashes, *secrets) if each in content] == []
        left_out = {
            (each["table"], name)
            for each in manifest(archive)["files"]
            for name in each.get("left_out", ())
        }
        assert left_out == SECRETS | {("issued_documents", "pdf")}


async def test_a_new_table_is_part_of_it_with_its_view(
    database: psycopg.Connection[Any], sessions: Sessions
) -> None:
    database.execute("CREATE TABLE notes (id bigint PRIMARY KEY, organization_id uuid, note text)")
    database.execute("INSERT INTO notes VALUES (1, %s, 'theirs'), (2, %s, 'ours')", [BOLT, ACME])
    database.execute(
        f"CREATE VIEW {SCHEMA}.notes AS SELECT * FROM notes WHERE organization_id"
        " = current_setting('weir.organization')::uuid".encode()
    )
    database.execute("GRANT SELECT ON ALL TABLES IN SCHEMA organization_border, public TO PUBLIC")

    archive = await export(sessions, ACME)

    assert rows_of(archive, "notes") == [{"id": "2", "organization_id": str(ACME), "note": "ours"}]


class Interrupting(io.BytesIO):
    """File that runs a statement on another connection before the first byte is written."""

    def __init__(self, database: psycopg.Connection[Any], statement: str) -> None:
        super().__init__()
        self._database = database
        self._statement = statement

    def write(self, content: Any) -> int:
        """Write, after the statement has been committed."""
        if self._statement:
            self._database.execute(self._statement.encode())
            self._statement = ""
        return super().write(content)


async def test_all_files_show_one_moment(
    database: psycopg.Connection[Any], sessions: Sessions
) -> None:
    statement = f"INSERT INTO projects (organization_id, name) VALUES ('{ACME}', 'later')"
    before = rows_of(await export(sessions, ACME), "projects")

    meanwhile = await export(sessions, ACME, Interrupting(database, statement))

    assert rows_of(meanwhile, "projects") == before
    assert (
        len(rows_of(meanwhile, "receipt_chains"))
        == len(rows_of(await export(sessions, ACME), "receipt_chains")) - 1
    )


@pytest.mark.parametrize("sessions", ["owner"], indirect=True)
async def test_memory_does_not_grow_with_the_rows(
    database: psycopg.Connection[Any], sessions: Sessions
) -> None:
    peaks = []
    for count in (10_000, 20_000):
        database.execute(
            "INSERT INTO projects (organization_id, name) SELECT %s, concat('p', %s::int, 'x', n)"
            " FROM generate_series(1, 10000) AS n",
            [ACME, count],
        )
        with tempfile.TemporaryFile() as file:
            tracemalloc.start()
            archive = await export(sessions, ACME, file)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert len(rows_of(archive, "projects")) > count
    assert peaks[1] < 1.2 * peaks[0]


def rewritten(archive: zipfile.ZipFile, **changed: bytes | None) -> zipfile.ZipFile:
    """Return a copy with other contents of some files, by the names of their tables."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as copy:
        for name in archive.namelist():
            table = name.removeprefix("tables/").removesuffix(".jsonl")
            if (content := changed.get(table, archive.read(name))) is not None:
                copy.writestr(name, content)
    return zipfile.ZipFile(file)


@pytest.mark.parametrize("sessions", ["owner"], indirect=True)
async def test_verification_finds_each_change(sessions: Sessions) -> None:
    archive = await export(sessions, ACME)
    summary = summary_of(archive)
    projects = archive.read("tables/projects.jsonl")
    assert summary["rows"]["projects"] == len(projects.splitlines())
    about = manifest(archive)
    entries = rows_of(archive, "ledger_entries")
    entries[0]["amount_picos"] = str(int(entries[0]["amount_picos"]) + 1)
    unbalanced = "".join(f"{json.dumps(each)}\n" for each in entries).encode()

    for changes, why in (
        ({"projects": None}, "lacks, repeats or adds"),
        ({"projects": projects.replace(b"search", b"zearch")}, "another digest"),
        ({"projects": projects + projects}, "rows instead of"),
        ({"projects": projects[:-1]}, "incomplete"),
        ({"ledger_entries": with_digest(about, "ledger_entries", unbalanced)}, "off by 1 picos"),
        ({"manifest.json": json.dumps(about | {"format": 2}).encode()}, "format is 2"),
    ):
        more = {}
        if "ledger_entries" in changes:
            more["manifest.json"] = json.dumps(about).encode()
        with pytest.raises(BadArchive, match=why):
            summary_of(rewritten(archive, **changes, **more))


def with_digest(about: dict[str, Any], table: str, content: bytes) -> bytes:
    """Write the digest of other contents into a manifest, and return them."""
    for each in about["files"]:
        if each.get("table") == table:
            each["sha256"] = hashlib.sha256(content).hexdigest()
    return content
