"""The migrations check, shown to pass what is there and to catch what it exists for."""

from __future__ import annotations

from sqlalchemy import create_engine, text

from infra import check_migrations
from metering.store.db import sqlalchemy_url


def test_migrations_go_up_down_and_up_and_equal_the_models(database_url: str) -> None:
    assert list(check_migrations.complaints(database_url)) == []


def test_what_no_migration_removes_and_no_model_declares_is_reported(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE stray (id bigint); CREATE TYPE mood AS ENUM ('calm')"))
    engine.dispose()

    found = list(check_migrations.complaints(database_url))

    assert "left over after the downgrade: table stray" in found
    assert "left over after the downgrade: type mood" in found
    assert any("stray" in line for line in found if line.startswith("the models are not what the migrations build"))
