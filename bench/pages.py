"""Time and size of every answer that the console reads, with many rows beside few.

    python -m bench.pages [--members 10000] [--events 1000000] [--directory DIR]

The database has two customers: a small one with 10 members, keys, limits, service accounts and end
users, and 1,000 requests; and a large one with `--members` of each and `--events` requests, half of
them in the month before, which is closed. There are as many organizations as members. An api
process answers the calls over HTTP as for a browser, JSON included. The calls are those that
`api/console/console.py` offers and that change nothing; a new one is measured at once, with the
values of `FIELDS`. The first way is the small customer.

The exit status is 1 if an answer took longer than 1 s in every round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default
from weir_client import BillingClient

from api.console.console import NAMES
from bench.harness import Bench, Case, Cases, Figure, Results, Values, main, note
from bench.site import MODEL, Server, new_site, quantile
from metering.ledger.rating import rate_all_pending
from metering.store.db import create_engine, create_sessions, psycopg_conninfo
from metering.tenants.authentication import hash_of, new_secret, prefix_of

ANSWER_MAX_MS = 1000.0
CLOSE_MAX_S = 600.0
REPEATS = 5  # of a call in a round
SMALL_COUNT, SMALL_EVENT_COUNT = 10, 1000
READS = ("List", "Get", "Verify")  # calls that change nothing begin so
# Offered calls that this driver leaves out, with the reasons.
LEFT_OUT = {
    "BillingService/GetResaleStatement": "needs resale prices; it costs by the end user's usage",
    "InferenceService/GetGeneration": "requests of the key itself; GetRequest reads the same rows",
    "InferenceService/GetQuota": "the limits of the key itself",
}
ISSUER = {
    "issuer_name": "Example Inc.",
    "issuer_address": "1 Main Street, Springfield",
    "issuer_payment": "Bank account 1",
}
GROUPINGS = ("DAY", "PROJECT", "API_KEY", "MODEL", "END_USER", "LABEL", "HOUR", "REQUEST")
# Fields of a usage report by its grouping; others must be left out.
OF_GROUPING: Mapping[str, Mapping[str, Any]] = {
    "LABEL": {"labelKey": "team"},
    "HOUR": {"month": None, "firstDay": "{today}", "lastDay": "{today}"},
    "END_USER": {"largestFirst": True},
    "REQUEST": {"latestFirst": True},
}
# Requests of a call besides the plain one, by name.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "AdminService/ListApiKeys": {
        "valid, by name": {"search": "key 99", "state": "API_KEY_STATE_VALID"},
        "without a match": {"search": "nothing"},
        "1,000 rows": {"pageSize": 1000},
    },
    "AdminService/ListMembers": {"by address": {"search": "person-1"}},
    "AdminService/ListOrganizations": {"by name": {"search": "customer-99"}},
    "AdminService/ListQuotas": {"of one key": {"organization": None, "apiKey": "{key}"}},
    "AdminService/ListAuditEntries": {"of one organization": {"subject": "{organization}"}},
    "BillingService/ListEndUsers": {"with usage": {"withUsage": True}},
    "BillingService/GetUsage": {
        grouping.lower(): {
            "groupBy": [f"USAGE_GROUPING_{grouping}"],
            **OF_GROUPING.get(grouping, {}),
        }
        for grouping in GROUPINGS
    },
}
# Values of the fields that a request has, by their name in JSON.
FIELDS: Mapping[str, Any] = {
    "organization": "{organization}",
    "month": "{month}",
    "pageSize": 100,
    "groupBy": ["USAGE_GROUPING_DAY"],
    "endUser": "user-1",
    "requestId": "{request}",
    "project": "",
    "model": "",
}
# Values of single calls.
OF_CALL: Mapping[str, Mapping[str, Any]] = {
    "AdminService/ListOrganizations": {"organization": None},
    "AdminService/ListQuotas": {"endUser": None},
    "AdminService/GetRequest": {"project": "{project}"},
    "BillingService/GetInvoice": {"month": "{closed}"},
    "BillingService/GetUsage": {"endUser": None},
    "BillingService/ListAlerts": {"endUser": None},
    "BillingService/VerifyMonth": {"month": "{closed}"},
    "BillingService/GetMonthDocument": {
        "month": "{closed}",
        "format": "MONTH_DOCUMENT_FORMAT_JSON",
    },
    "InferenceService/GetOwnUsage": {"endUser": None, "project": True},
    "ReceiptService/GetReceiptMonth": {"month": "{closed}"},
}

# Rows of one customer, in the order of their references. `begins` is the first day of this month.
FILL = (
    """
    INSERT INTO api_keys (project_id, name, prefix, scopes, secret_hash, created_at, revoked_at)
    SELECT %(project)s, 'key ' || n, 'wk_' || substr(md5(%(name)s || n), 1, 8), '{inference}',
           sha256((%(name)s || n)::bytea), now() - make_interval(mins => n),
           CASE WHEN n %% 10 = 0 THEN now() END
    FROM generate_series(1, %(count)s) n
    """,
    """
    INSERT INTO persons (email, display_name)
    SELECT 'person-' || n || '@' || %(name)s || '.example', 'Person ' || n
    FROM generate_series(1, %(count)s) n
    """,
    """
    INSERT INTO api_keys (project_id, name, prefix, scopes, role)
    SELECT %(project)s, 'member ' || email, 'wm_' || substr(md5(email), 1, 8), '{}', 'viewer'
    FROM persons WHERE email LIKE '%%@' || %(name)s || '.example'
    """,
    """
    INSERT INTO memberships (person_id, organization_id, api_key_id)
    SELECT p.id, %(organization)s, k.id
    FROM persons p JOIN api_keys k
      ON k.prefix = 'wm_' || substr(md5(email), 1, 8) AND k.name = 'member ' || email
    WHERE email LIKE '%%@' || %(name)s || '.example'
    """,
    """
    INSERT INTO service_accounts (organization_id, name, role)
    SELECT %(organization)s, 'account ' || n, '' FROM generate_series(1, %(count)s) n
    """,
    """
    INSERT INTO invitations (organization_id, project_id, email, role, token_hash, issuer,
                             expires_at)
    SELECT %(organization)s, %(project)s, 'new-' || n || '@' || %(name)s || '.example', 'viewer',
           sha256((%(name)s || n)::bytea), '', now() + interval '7 days'
    FROM generate_series(1, %(count)s) n
    """,
    """
    INSERT INTO usage_subjects (organization_id, kind, name)
    SELECT %(organization)s, 'end_user', 'user-' || n FROM generate_series(1, %(count)s) n
    """,
    """
    INSERT INTO quotas (subject, subject_id, dimension, limit_value)
    SELECT 'api_key', id, 'tokens_per_day', 1000000
    FROM api_keys WHERE project_id = %(project)s AND name LIKE 'key %%'
    """,
    """
    INSERT INTO quotas (subject, subject_id, within_id, dimension, limit_value)
    SELECT 'end_user', id, organization_id, 'tokens_per_day', 1000000
    FROM usage_subjects WHERE organization_id = %(organization)s
    """,
    """
    INSERT INTO credit_grants (organization_id, currency_code, amount_picos, first_month,
                               last_month, reason, granted_by)
    SELECT %(organization)s, 'USD', 1000000, %(begins)s, %(begins)s, 'gift', 'bench'
    FROM generate_series(1, 10)
    """,
    """
    INSERT INTO audit_log (actor, action, subject_id, after)
    SELECT 'bench', 'api_key.create', k.id::text,
           jsonb_build_object('name', k.name, 'prefix', k.prefix, 'project_id', k.project_id)
    FROM api_keys k WHERE project_id = %(project)s
    """,
)
# Settled requests in the 20 days before now, or before the end of the month before.
REQUESTS = (
    """
    INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
                       price_version_id, labels, state, process_id, input_token_count,
                       cached_input_token_count, leased_token_count, delivered_token_count,
                       quota_ids, admitted_at, expires_at, ended_at, end_user_id)
    SELECT gen_random_uuid(), %(organization)s, %(project)s, k.ids[1 + n %% cardinality(k.ids)],
           gen_random_uuid(), sha256(''), p.model, p.id,
           jsonb_build_object('team', 'team-' || n %% 50), 'settled', gen_random_uuid(),
           800 + n %% 400, n %% 200, 100, 100, '{}', at, at, at, u.ids[1 + n %% cardinality(u.ids)]
    FROM generate_series(1, %(event_count)s) n,
         LATERAL (
             SELECT CASE n %% 2 WHEN 0 THEN now() ELSE %(begins)s::timestamptz END
                    - interval '1 s' - n * (interval '20 days' / %(event_count)s) AS at
         ) t,
         (SELECT array_agg(id) AS ids FROM api_keys
          WHERE project_id = %(project)s AND name LIKE 'key %%') k,
         (SELECT array_agg(id) AS ids FROM usage_subjects
          WHERE organization_id = %(organization)s) u,
         (SELECT id, model FROM price_versions ORDER BY id LIMIT 1) p
    """,
    """
    INSERT INTO usage_events (
        hold_id, organization_id, project_id, api_key_id, request_id, model, outcome,
        input_token_count, cached_input_token_count, generated_token_count, delivered_token_count,
        billed_token_count, price_version_id, cost_picos, labels, admitted_at, settled_at,
        end_user_id)
    SELECT h.id, h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model, 'stop',
           h.input_token_count, h.cached_input_token_count, 100, 100, 100, p.id,
           (h.input_token_count - h.cached_input_token_count) * p.input_picos_per_token
               + h.cached_input_token_count * p.cached_input_picos_per_token
               + 100 * p.output_picos_per_token,
           h.labels, h.admitted_at, h.ended_at, h.end_user_id
    FROM holds h JOIN price_versions p ON p.id = h.price_version_id
    WHERE h.organization_id = %(organization)s
    ORDER BY h.ended_at
    """,
)


@dataclass(frozen=True, slots=True)
class Customer:
    """Customer of the database: its name, and the values that requests about it have."""

    name: str
    values: Mapping[str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of rows."""
    parser.add_argument("--members", type=int, default=10_000, help="and keys, limits, end users")
    parser.add_argument("--events", type=int, default=1_000_000, help="requests of the customer")
    parser.add_argument("--directory", help="of the temporary database (default: the system's)")


def month_text(day: datetime) -> str:
    return f"{day:%Y-%m}"


def fill(database_url: str, name: str, count: int, event_count: int) -> Customer:
    """Create a customer with so many keys, members and end users, and so many requests."""
    now = datetime.now(UTC)
    begins = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    organization, project = uuid.uuid4(), uuid.uuid4()
    values: dict[str, Any] = {
        "organization": organization,
        "project": project,
        "name": name,
        "count": count,
        "event_count": event_count,
        "begins": begins,
    }
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute(
            "INSERT INTO organizations (id, name, currency_code) VALUES (%(organization)s,"
            " %(name)s, 'USD')",
            values,
        )
        connection.execute(
            "INSERT INTO projects (id, organization_id, name) VALUES (%(project)s,"
            " %(organization)s, 'main')",
            values,
        )
        for statement in (*FILL, *REQUESTS):
            connection.execute(statement.encode(), values)
        connection.execute("ANALYZE")  # as autovacuum does after so many rows
        request = connection.execute(
            "SELECT request_id FROM usage_events WHERE organization_id = %s LIMIT 1",
            (organization,),
        ).fetchone()
        assert request is not None
        key = connection.execute(
            "SELECT prefix FROM api_keys WHERE project_id = %s AND name = 'key 1'", (project,)
        ).fetchone()
        assert key is not None
    return Customer(
        name,
        {
            "organization": name,
            "project": str(project),
            "request": str(request[0]),
            "key": key[0],
            "month": month_text(begins),
            "closed": month_text(begins - timedelta(days=1)),
            "today": f"{now:%Y-%m-%d}",
        },
    )


def operator_key(database_url: str, count: int) -> str:
    """Create further organizations, a price, and a key of the operator; return its secret."""
    secret = new_secret()
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute(
            "INSERT INTO price_versions (model, currency_code, input_picos_per_token,"
            " cached_input_picos_per_token, output_picos_per_token, effective_at) VALUES (%s,"
            " 'USD', 3, 1, 7, now() - interval '90 days')",
            (MODEL,),
        )
        connection.execute(
            "INSERT INTO organizations (name, currency_code) SELECT 'customer-' || n, 'USD'"
            " FROM generate_series(1, %s) n",
            (count,),
        )
        connection.execute(
            "INSERT INTO projects (organization_id, name) SELECT id, 'main' FROM organizations"
            " WHERE name = 'customer-1'"
        )
        connection.execute(
            "INSERT INTO api_keys (project_id, name, prefix, secret_hash, scopes)"
            " SELECT id, 'operator', %s, %s, '{inference,admin,billing}' FROM projects",
            (prefix_of(secret), hash_of(secret)),
        )
    return secret


async def rate_all(database_url: str) -> None:
    """Rate and post all requests, as a worker does."""
    engine = create_engine(database_url, pool_size=1)
    sessions = create_sessions(engine)
    while await rate_all_pending(sessions):
        pass
    await engine.dispose()


class Page:
    """Browser that reads from one server with one key."""

    def __init__(self, server: Server, secret: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=600)
        self._headers = {
            "authorization": f"Bearer {secret}",
            "content-type": "application/json",
        }

    def read(self, name: str, request: Mapping[str, Any]) -> bytes:
        """Return the answer to a call. Raises: RuntimeError if it is refused."""
        body = json.dumps(request).encode()
        self._connection.request("POST", f"/console/api/{name}", body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{name} {request} was refused: {answer[:500].decode()}")
        return answer

    def timed(self, name: str, request: Mapping[str, Any]) -> Values:
        """Measure a call several times."""
        times_ms, answer = [], b""
        for _ in range(REPEATS):
            start = time.perf_counter()
            answer = self.read(name, request)
            times_ms.append((time.perf_counter() - start) * 1e3)
        return {
            "p50_ms": quantile(times_ms, 0.5),
            "max_ms": max(times_ms),
            "kib": len(answer) / 1024,
        }


def request_type(name: str) -> Descriptor:
    service, _, method = name.partition("/")
    return Default().FindServiceByName(f"weir.v1.{service}").methods_by_name[method].input_type


def requests_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a call, each with the name of its case."""
    fields = [each.json_name for each in request_type(name).fields]
    plain = {**{each: FIELDS[each] for each in fields if each in FIELDS}, **OF_CALL.get(name, {})}
    variants = VARIANTS.get(name, {})
    if name != "BillingService/GetUsage":
        yield name, plain
    for variant, more in variants.items():
        yield f"{name}, {variant}", {**plain, **more}


def about(request: Mapping[str, Any], customer: Customer) -> dict[str, Any]:
    """Return a request about a customer. Fields that are None are left out."""
    return {
        name: value.format(**customer.values) if isinstance(value, str) else value
        for name, value in request.items()
        if value is not None
    }


@contextlib.asynccontextmanager
async def prepare(options: argparse.Namespace) -> AsyncIterator[Cases]:
    """Fill a database, start an api process, and yield a case for each request."""
    with new_site(options.directory) as site:
        secret = operator_key(site.database_url, options.members)
        note("fills the database")
        small = fill(site.database_url, "small", SMALL_COUNT, SMALL_EVENT_COUNT)
        large = fill(site.database_url, "large", options.members, options.events)
        note("rates the requests")
        await rate_all(site.database_url)
        conninfo = psycopg_conninfo(site.database_url)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
        with site.simulated(1.0, **ISSUER) as server:
            note("closes the month before")
            with BillingClient(server.address, secret, timeout=CLOSE_MAX_S) as billing:
                for customer in (small, large):
                    billing.close_month(customer.name, customer.values["closed"])
            page = Page(server, secret)
            yield [
                Case(
                    case,
                    {
                        name: partial(page.timed, call, about(request, customer))
                        for name, customer in (
                            (f"{SMALL_COUNT} rows", small),
                            (f"{options.members:,} rows", large),
                        )
                    },
                )
                for call in NAMES
                if call.partition("/")[2].startswith(READS) and call not in LEFT_OUT
                for case, request in requests_of(call)
            ]


def passed(results: Results) -> bool:
    """Return False if any answer took too long in every round, and name those."""
    slow = [
        f"{case} ({way}): {min(each['max_ms'] for each in rows):,.0f} ms"
        for case, ways in results.items()
        for way, rows in ways.items()
        if min(each["max_ms"] for each in rows) > ANSWER_MAX_MS
    ]
    for each in slow:
        note(f"takes longer than {ANSWER_MAX_MS:,.0f} ms: {each}")
    return not slow


BENCH = Bench(
    __doc__,
    {
        "p50_ms": Figure("p50, ms", ",.1f"),
        "max_ms": Figure("maximum, ms", ",.1f", "no"),
        "kib": Figure("answer, KiB", ",.1f", "no"),
    },
    prepare,
    add_options,
    passed=passed,
)

if __name__ == "__main__":
    main(BENCH)
