"""Export of an organization: every row of its border as JSON Lines, its documents, and a manifest.

The tables are those with a view in `organization_border`, found in the catalog, so a new table is
part of the export as soon as it has its view. The session must be of that border, on one snapshot:
then no row of another organization is within reach, and all files show the same moment. The archive
is written to a file before it is sent, so that a slow client holds no snapshot, with a batch of
rows in memory at a time. Numbers of 64 bits and more, such as amounts in picos, are texts, because
readers of JSON round them; all values are read again by `jsonb_populate_record`. Secrets and their
hashes are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import IO, Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import UNLOGGED
from metering.core.models import Organization
from metering.store.border import SCHEMA
from metering.store.db import read_one_moment

FORMAT = 1  # of the archive; a reader refuses others
BATCH_ROWS = 500
STATEMENT_MAX_S = 300.0  # sorts some ten million rows
# Columns that are files of their own, and the names of these.
FILES = {("issued_documents", "pdf"): "documents/{name}.pdf"}
# Tables of the border with their columns, types and primary keys.
TABLES = text(f"""
SELECT t.relname AS name,
       array_agg(CAST(a.attname AS text) ORDER BY a.attnum) AS columns,
       array_agg(format_type(a.atttypid, NULL) ORDER BY a.attnum) AS types,
       ARRAY(
           SELECT CAST(k.attname AS text)
           FROM pg_index i
           JOIN pg_attribute k ON k.attrelid = i.indrelid AND k.attnum = ANY(i.indkey)
           WHERE i.indrelid = t.oid AND i.indisprimary
           ORDER BY array_position(i.indkey, k.attnum)
       ) AS key
FROM pg_class t
JOIN pg_class v ON v.relname = t.relname AND v.relnamespace = CAST('{SCHEMA}' AS regnamespace)
JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE t.relnamespace = CAST('public' AS regnamespace) AND t.relkind IN ('r', 'p')
GROUP BY t.oid, t.relname
ORDER BY t.relname
""")
# Qualified, because the view of that table has no rows.
POSITION = text("""
SELECT (SELECT version_num FROM public.alembic_version) AS schema_revision,
       CAST(pg_current_snapshot() AS text) AS snapshot,
       now() AS at
""")
CONVERSIONS = {
    "bigint": "CAST({} AS text)",
    "numeric": "CAST({} AS text)",
    "bigint[]": "CAST({} AS text[])",
    "numeric[]": "CAST({} AS text[])",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the border: the columns of its rows in the export, and those left out."""

    name: str
    columns: dict[str, str]
    key: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def rows(self) -> str:
        """SQL of its rows, as JSON in the order of the primary key, or of all columns."""
        values = ", ".join(
            f"{CONVERSIONS.get(kind, '{}').format(_quoted(name))} AS {_quoted(name)}"
            for name, kind in self.columns.items()
        )
        # Qualified: the values have the names of the columns.
        order = ", ".join(f"t.{_quoted(each)}" for each in self.key) or "t"
        return (
            f"SELECT CAST(row_to_json(x) AS text) FROM (SELECT {values}"
            f" FROM {SCHEMA}.{_quoted(self.name)} AS t ORDER BY {order}) AS x"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """File of the archive in the manifest. `row_count` is None for a document."""

    file: str
    sha256: str
    byte_count: int
    row_count: int | None = None
    table: str = ""
    columns: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class Archive:
    """ZIP archive that is written file by file; compression runs in a thread."""

    zip: zipfile.ZipFile
    at: datetime
    entries: list[Entry] = field(default_factory=list)

    async def add(self, name: str, chunks: AsyncIterator[tuple[int, bytes]], **about: Any) -> None:
        """Write a file from chunks, each with its number of rows, and note its digest."""
        digest, byte_count, row_count = hashlib.sha256(), 0, 0
        info = zipfile.ZipInfo(name, self.at.timetuple()[:6])
        info.compress_type = zipfile.ZIP_DEFLATED
        with self.zip.open(info, "w", force_zip64=True) as file:
            async for count, chunk in chunks:
                digest.update(chunk)
                byte_count, row_count = byte_count + len(chunk), row_count + count
                await asyncio.to_thread(file.write, chunk)
        rows = row_count if about else None
        self.entries.append(Entry(name, digest.hexdigest(), byte_count, rows, **about))


async def write_export(session: AsyncSession, owner: Organization, file: IO[bytes]) -> None:
    """Write the export of the organization of a session's border as a ZIP archive.

    Begins the transaction of the session, a snapshot. Holds a batch of rows in memory, or one
    document.
    """
    await read_one_moment(session, STATEMENT_MAX_S)
    await session.execute(text("SET LOCAL timezone = 'UTC'"))
    position = (await session.execute(POSITION)).one()
    with zipfile.ZipFile(file, "w") as opened:
        archive = Archive(opened, position.at.astimezone(UTC))
        for table in await tables(session):
            await archive.add(
                f"tables/{table.name}.jsonl",
                _rows(session, table),
                table=table.name,
                columns=tuple(table.columns),
                left_out=table.left_out,
            )
        for (table_name, column), form in FILES.items():
            of_file = text(f"SELECT * FROM {SCHEMA}.{_quoted(table_name)} WHERE name = :name")
            names = text(f"SELECT name FROM {SCHEMA}.{_quoted(table_name)} ORDER BY name")
            for name in (await session.scalars(names)).all():
                row = (await session.execute(of_file, {"name": name})).one()
                await archive.add(form.format(name=name), _whole(getattr(row, column)))
        manifest = {
            "format": FORMAT,
            "organization": {"id": str(owner.id), "name": owner.name},
            "exported_at": position.at.astimezone(UTC).isoformat(),
            "schema_revision": position.schema_revision,
            "snapshot": position.snapshot,
            "files": [
                {name: value for name, value in asdict(each).items() if value not in (None, "", ())}
                for each in archive.entries
            ],
        }
        opened.writestr("manifest.json", json.dumps(manifest, indent=2) + "\n")


async def tables(session: AsyncSession) -> list[Table]:
    """Read the tables of the border from the catalog, by name."""
    found = []
    for row in await session.execute(TABLES):
        columns = dict(zip(row.columns, row.types, strict=True))
        left_out = tuple(each for each in columns if each in UNLOGGED or (row.name, each) in FILES)
        kept = {name: kind for name, kind in columns.items() if name not in left_out}
        found.append(Table(row.name, kept, tuple(row.key), left_out))
    return found


async def _rows(session: AsyncSession, table: Table) -> AsyncIterator[tuple[int, bytes]]:
    result = await session.stream(text(table.rows))
    async for rows in result.partitions(BATCH_ROWS):
        yield len(rows), "".join(f"{line}\n" for (line,) in rows).encode()


async def _whole(content: bytes) -> AsyncIterator[tuple[int, bytes]]:
    yield 0, content


def _quoted(name: str) -> str:
    return f'"{name}"'
