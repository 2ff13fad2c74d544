"""Schema upgrades of a database with usage and a ledger in it: what was posted stays posted, and going back rates it again."""

from __future__ import annotations

import psycopg
from alembic import command
from sqlalchemy import make_url

from metering.ledger.rating import rate_all_pending
from metering.proof.fsck import CHECKS, fsck
from metering.store.db import create_engine, create_sessions, psycopg_conninfo
from metering.store.migrations_runner import config, migrate
from tests.conftest import new_database

# As revision 0006 had it: a transaction per event, none where there are no tokens.
BEFORE = """
INSERT INTO organizations (id, name, currency_code) VALUES (gen_random_uuid(), 'acme', 'USD'), (gen_random_uuid(), 'bolt', 'USD');
INSERT INTO projects (organization_id, name) SELECT id, 'search' FROM organizations;
INSERT INTO api_keys (project_id, name, prefix, secret_hash, scopes)
    SELECT id, 'k', id::text, sha256(id::text::bytea), '{inference}' FROM projects;
INSERT INTO price_versions (model, currency_code, input_picos_per_token, cached_input_picos_per_token, output_picos_per_token,
                            effective_at) VALUES ('demo', 'USD', 3, 1, 7, '2026-01-01');
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels, state,
                   owner_id, input_token_count, leased_token_count, delivered_token_count, quota_ids, admitted_at, expires_at,
                   ended_at)
    SELECT gen_random_uuid(), p.organization_id, p.id, k.id, gen_random_uuid(), '\\x00', 'demo', 1, '{}', 'settled',
           gen_random_uuid(), i, i, i, '{}', at, at, at
    FROM projects p JOIN api_keys k ON k.project_id = p.id, generate_series(0, 9) i,
         LATERAL (SELECT timestamptz '2026-10-30 12:00+00' + i * interval '10 hours') t (at);
INSERT INTO usage_events (hold_id, organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count,
                          cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count,
                          price_version_id, cost_picos, labels, admitted_at, settled_at)
    SELECT id, organization_id, project_id, api_key_id, request_id, model, 'stop', input_token_count, 0, delivered_token_count,
           delivered_token_count, delivered_token_count, 1, input_token_count * 10, '{}', admitted_at, ended_at
    FROM holds ORDER BY ended_at;
"""
RATED = """
INSERT INTO ledger_accounts (organization_id, kind, currency_code)
    SELECT id, kind, 'USD' FROM organizations, unnest('{receivable,revenue}'::text[]) kind WHERE name = 'acme';
INSERT INTO ledger_transactions (organization_id, usage_event_id, description, effective_at)
    SELECT organization_id, id, 'usage', settled_at FROM usage_events
    WHERE input_token_count BETWEEN 1 AND 7 AND organization_id = (SELECT id FROM organizations WHERE name = 'acme');
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
    SELECT t.id, a.id, leg.amount, leg.kind, leg.count, leg.version
    FROM ledger_transactions t JOIN usage_events u ON u.id = t.usage_event_id,
         LATERAL (VALUES ('receivable', u.cost_picos, NULL, NULL::bigint, NULL::bigint),
                         ('revenue', -3 * u.input_token_count, 'input', u.input_token_count, 1),
                         ('revenue', -7 * u.billed_token_count, 'output', u.billed_token_count, 1))
                 AS leg (account, amount, kind, count, version)
    JOIN ledger_accounts a ON a.kind = leg.account;
UPDATE usage_events u SET rated_at = now()
    WHERE EXISTS (SELECT FROM ledger_transactions WHERE usage_event_id = u.id) OR input_token_count = 0;
"""
STANDING = """
SELECT count(*), count(rated_at), count(DISTINCT ledger_transaction_id), (SELECT count(*) FROM ledger_transactions),
       (SELECT count(*) FROM ledger_entries), (SELECT sum(token_count)::int FROM ledger_entries) FROM usage_events
"""


def complaints(url: str) -> list[str]:
    """Whatever is wrong with the books."""
    return [f"{verdict.check.name}: {verdict.sample}" for verdict in fsck(url, CHECKS) if verdict.violation_count]


async def test_what_was_posted_before_stays_posted_and_the_rest_is_rated(postgres_server: str) -> None:
    with new_database(postgres_server) as url, psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {make_url(url).database} SET timezone = 'America/New_York'".encode())
        migrate(url, "0006")
        for statements in (BEFORE, RATED):
            connection.execute(statements.encode())

        migrate(url)
        carried = connection.execute(STANDING.encode()).fetchone()
        engine = create_engine(url)
        rated_count = await rate_all_pending(create_sessions(engine))
        found = complaints(url)
        command.downgrade(config(url), "0006")
        back = connection.execute("SELECT count(rated_at), (SELECT count(*) FROM ledger_entries) FROM usage_events").fetchone()
        migrate(url)
        again_count = await rate_all_pending(create_sessions(engine))
        found_again = complaints(url)
        await engine.dispose()

    # Of 20 events 7 had a transaction, and the 2 without tokens get one each: 28 tokens in and as many out.
    assert carried == (20, 9, 9, 9, 7 * 3 + 2, 56)
    assert (rated_count, back, again_count) == (11, (0, 0), 20)
    assert (found, found_again) == ([], [])
