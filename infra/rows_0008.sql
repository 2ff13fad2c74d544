-- A small installation at revision 0008, the schema of release 0.1.0, with rows in every table, which `weir fsck` finds sound. Later
-- migrations must neither lose nor change them. `infra/check_migrations.py` loads it between two migrations. A newer schema must accept
-- the same statements, since api processes of the release before go on writing while newer ones start.
INSERT INTO organizations (id, name, currency_code, created_at) VALUES
    ('a0000000-0000-4000-8000-000000000001', 'acme', 'USD', '2026-08-01'),
    ('a0000000-0000-4000-8000-000000000002', 'bolt', 'JPY', '2026-08-02');
INSERT INTO projects (id, organization_id, name) VALUES
    ('b0000000-0000-4000-8000-000000000001', 'a0000000-0000-4000-8000-000000000001', 'search'),
    ('b0000000-0000-4000-8000-000000000002', 'a0000000-0000-4000-8000-000000000002', 'search');
INSERT INTO api_keys (id, project_id, name, prefix, secret_hash, scopes, models, max_output_tokens, allowed_networks, expires_at,
                      revoked_at) VALUES
    ('c0000000-0000-4000-8000-000000000001', 'b0000000-0000-4000-8000-000000000001', 'prod', 'wk_aaaaaaaa', sha256('1'),
     '{inference,admin,billing}', '{}', NULL, '{}', NULL, NULL),
    ('c0000000-0000-4000-8000-000000000002', 'b0000000-0000-4000-8000-000000000002', 'prod', 'wk_bbbbbbbb', sha256('2'),
     '{inference}', '{demo}', 4096, '{203.0.113.0/24}', '2099-01-01', NULL),
    ('c0000000-0000-4000-8000-000000000003', 'b0000000-0000-4000-8000-000000000001', 'old', 'wk_cccccccc', sha256('3'),
     '{inference}', '{}', NULL, '{}', NULL, '2026-09-09');
INSERT INTO api_key_uses (api_key_id, last_used_at) VALUES ('c0000000-0000-4000-8000-000000000001', '2026-11-05 12:00+00');
INSERT INTO superseded_secrets (secret_hash, api_key_id, expires_at)
VALUES (sha256('0'), 'c0000000-0000-4000-8000-000000000001', '2026-10-02');
INSERT INTO admin_requests (request_id, method, payload_hash, subject_id)
VALUES ('d0000000-0000-4000-8000-00000000000a', 'CreateOrganization', sha256('acme'), 'a0000000-0000-4000-8000-000000000001');
INSERT INTO audit_log (actor, action, subject_id, before, after) VALUES
    ('cli', 'organization.create', 'a0000000-0000-4000-8000-000000000001', NULL, '{"name": "acme"}'),
    ('wk_aaaaaaaa', 'quota.set', 'e0000000-0000-4000-8000-000000000001', '{"limit_value": 1}', '{"limit_value": 1000000}');

INSERT INTO quotas (id, subject, subject_id, model, dimension, limit_value, output_weight_milli, enforced,
                    override_limit_value, override_until, override_reason, deleted_at, alert_at) VALUES
    ('e0000000-0000-4000-8000-000000000001', 'organization', 'a0000000-0000-4000-8000-000000000001', '', 'tokens_per_month', 1000000,
     2500, true, 2000000, '2099-01-01', 'a launch', NULL, '{50,80,100}'),
    ('e0000000-0000-4000-8000-000000000002', 'api_key', 'c0000000-0000-4000-8000-000000000001', 'demo', 'concurrent_requests', 0,
     1000, false, NULL, NULL, NULL, NULL, '{}'),
    ('e0000000-0000-4000-8000-000000000003', 'organization', 'a0000000-0000-4000-8000-000000000002', '', 'prepaid_credit_picos',
     9223372036854775807, 1000, true, NULL, NULL, NULL, NULL, '{}'),
    ('e0000000-0000-4000-8000-000000000004', 'project', 'b0000000-0000-4000-8000-000000000001', '', 'requests_per_minute', 60, 1000,
     true, NULL, NULL, NULL, '2026-10-10', '{}');
INSERT INTO quota_counters (quota_id, window_start, used, held, would_refuse_count) VALUES
    ('e0000000-0000-4000-8000-000000000001', '2026-09-01', 225010, 0, 0),
    ('e0000000-0000-4000-8000-000000000001', '2026-10-01', 95, 0, 0), ('e0000000-0000-4000-8000-000000000001', '2026-11-01', 82, 135, 0),
    ('e0000000-0000-4000-8000-000000000002', '1970-01-01', 0, 1, 7),
    ('e0000000-0000-4000-8000-000000000003', '1970-01-01', 9223372036854775807, 0, 0);
INSERT INTO prepaid_organizations (organization_id, quota_id, month)
VALUES ('a0000000-0000-4000-8000-000000000002', 'e0000000-0000-4000-8000-000000000003', '2026-11-01');
INSERT INTO price_versions (id, model, currency_code, input_picos_per_token, cached_input_picos_per_token, output_picos_per_token,
                            embedding_picos_per_token, organization_id, tier, multiplier_milli, withdrawn, effective_at)
OVERRIDING SYSTEM VALUE VALUES
    (1, 'demo', 'USD', 150000, 15000, 600000, 0, NULL, 'interactive', 1000, false, '2026-01-01'),
    (2, 'demo', 'USD', 75000, 7500, 300000, 20000, NULL, 'batch', 500, false, '2026-01-01'),
    (3, 'demo', 'JPY', 10000000000000, 10000000000000, 10000000000000, 0, 'a0000000-0000-4000-8000-000000000002', 'interactive',
     1000, false, '2026-01-01'),
    (4, 'demo', 'JPY', 0, 0, 0, 0, 'a0000000-0000-4000-8000-000000000002', 'batch', 1000, true, '2026-01-02');
SELECT setval(pg_get_serial_sequence('price_versions', 'id'), 4);

-- Request n of acme: two rated and one not, one that expired and was settled later, one voided, one that runs, and one that an
-- adjustment bills; one of bolt. Labels with what JSON and people write. The first months have no partition when they are written.
CREATE TEMPORARY TABLE requests AS
SELECT n, ('f0000000-0000-4000-8000-00000000000' || n)::uuid AS id, ('a0000000-0000-4000-8000-00000000000' || o)::uuid AS organization_id,
       ('b0000000-0000-4000-8000-00000000000' || o)::uuid AS project_id, ('c0000000-0000-4000-8000-00000000000' || o)::uuid AS api_key_id,
       version, state, sent, cached, leased, delivered, at, labels::jsonb
FROM (VALUES
    (1, 1, 1, 'settled', 100000, 40000, 64000, 50000, timestamptz '2026-09-30 23:59:59.999999+00', '{"team": "Süd \"1\"", "emoji": "\\u2603"}'),
    (2, 1, 2, 'settled', 20, 0, 30, 30, timestamptz '2026-10-01 00:00:00+00', '{}'),
    (3, 1, 1, 'settled', 7, 0, 3, 3, timestamptz '2026-11-02 12:00:00+00', '{}'),
    (4, 1, 1, 'expired', 9, 0, 16, 5, timestamptz '2026-11-03 12:00:00+00', '{}'),
    (5, 1, 1, 'voided', 9, 0, 16, 0, timestamptz '2026-11-04 12:00:00+00', '{}'),
    (6, 1, 1, 'held', 8, 0, 64, 10, timestamptz '2026-11-05 12:00:00+00', '{}'),
    (7, 2, 3, 'settled', 400000, 0, 500000, 500000, timestamptz '2026-10-05 12:00:00+00', '{}'),
    (8, 1, 1, 'settled', 10, 0, 4, 0, timestamptz '2026-09-20 12:00:00+00', '{}')
) AS r (n, o, version, state, sent, cached, leased, delivered, at, labels);
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels, state,
                   process_id, input_token_count, cached_input_token_count, leased_token_count,
                   delivered_token_count, posted_token_count, posted_cost_picos, posted_minutes, quota_ids, admitted_at, charged_at, expires_at, ended_at)
SELECT id, organization_id, project_id, api_key_id, ('f1000000-0000-4000-8000-00000000000' || n)::uuid, sha256(id::text::bytea), 'demo', version, labels, state,
       'd0000000-0000-4000-8000-000000000001', sent, cached, leased, delivered, CASE n WHEN 6 THEN 18 ELSE 0 END,
       CASE n WHEN 6 THEN 7200000 ELSE 0 END, CASE n WHEN 6 THEN '{29897999,8}'::bigint[] ELSE '{}' END,
       CASE n WHEN 6 THEN '{e0000000-0000-4000-8000-000000000001,e0000000-0000-4000-8000-000000000002}'::uuid[]
              WHEN 7 THEN '{}' ELSE '{e0000000-0000-4000-8000-000000000001}' END, at - interval '1 minute', at, at + interval '1 minute',
       CASE WHEN state <> 'held' THEN at END
FROM requests ORDER BY n;
-- The hashes of the receipts of requests 1 and 2, as docs/reference/receipts.md defines them.
CREATE TEMPORARY TABLE receipts AS SELECT * FROM (VALUES
    (1, decode(repeat('00', 32), 'hex'), '\x02e13ba0548e03ceeaecbff54ae38b60119d5f3c053a11b518b79cdb7ff8f5c0'::bytea),
    (2, '\x02e13ba0548e03ceeaecbff54ae38b60119d5f3c053a11b518b79cdb7ff8f5c0'::bytea, '\x4baa1988f222712fc819f35a7f632893c5af970d203c366993b2eb4894e106fe'::bytea)
) AS r (n, previous, hash);
INSERT INTO receipt_keys (id, public_key) VALUES (left(encode(sha256(sha256('key')), 'hex'), 16), sha256('key'));
INSERT INTO receipt_batches (key_id, hashes, signature)
SELECT id, (SELECT string_agg(hash, '' ORDER BY n) FROM receipts), sha256('s') || sha256('t') FROM receipt_keys;
INSERT INTO usage_events (hold_id, part, organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count,
                          cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count,
                          price_version_id, cost_picos, timings, labels, recovered, admitted_at, settled_at, receipt_sequence,
                          previous_receipt_hash, receipt_hash, receipt_batch_id)
SELECT r.id, part, r.organization_id, r.project_id, r.api_key_id, h.request_id, 'demo', CASE r.state WHEN 'expired' THEN 'failed' ELSE 'stop' END,
       CASE part WHEN 0 THEN sent ELSE 0 END, CASE part WHEN 0 THEN cached ELSE 0 END, delivered, delivered, delivered, version,
       CASE WHEN part = 0 AND r.n <> 8 THEN (sent - cached) * p.input_picos_per_token + cached * p.cached_input_picos_per_token ELSE 0 END
           + delivered * p.output_picos_per_token,
       CASE r.n WHEN 1 THEN '{"total_ms": 12.5}'::jsonb END, r.labels, r.state = 'expired', at, at + part * interval '1 day',
       x.n, x.previous, x.hash,
       CASE WHEN x.n IS NOT NULL THEN (SELECT max(b.id) FROM receipt_batches b) END
FROM requests r JOIN holds h ON h.id = r.id JOIN price_versions p ON p.id = version
     LEFT JOIN receipts x ON x.n = r.n,
     generate_series(0, CASE r.n WHEN 4 THEN 1 ELSE 0 END) AS part
WHERE r.state IN ('settled', 'expired') ORDER BY r.n, part;
UPDATE receipt_chains SET last_sequence = n, last_hash = hash, last_settled_at = '2026-10-01' FROM receipts
WHERE n = 2 AND project_id = 'b0000000-0000-4000-8000-000000000001';

INSERT INTO ledger_accounts (id, organization_id, kind, currency_code) OVERRIDING SYSTEM VALUE
SELECT row_number() OVER (ORDER BY o.name, kind), o.id, kind, o.currency_code
FROM organizations o, unnest('{receivable,revenue,rounding,adjustment,prepaid_credit,credit_funding}'::text[]) AS kind;
SELECT setval(pg_get_serial_sequence('ledger_accounts', 'id'), 12);
INSERT INTO ledger_transactions (id, organization_id, kind, billing_month, effective_at, description) OVERRIDING SYSTEM VALUE
SELECT n, organization_id, 'usage', date_trunc('month', at AT TIME ZONE 'UTC')::date, date_trunc('day', at, 'UTC'), 'usage'
FROM requests WHERE n IN (1, 2, 7);
INSERT INTO ledger_transactions (id, organization_id, kind, billing_month, effective_at, description, source_id)
OVERRIDING SYSTEM VALUE VALUES
    (8, 'a0000000-0000-4000-8000-000000000001', 'credit_granted', '2026-09-01', '2026-09-01', 'paid', 'd0000000-0000-4000-8000-00000000000b'),
    (9, 'a0000000-0000-4000-8000-000000000001', 'adjustment', '2026-09-01', '2026-10-02', 'misstated usage', 'd0000000-0000-4000-8000-00000000000d'),
    (10, 'a0000000-0000-4000-8000-000000000001', 'credit_applied', '2026-09-01', '2026-10-02', 'paid', NULL),
    (11, 'a0000000-0000-4000-8000-000000000001', 'rounding', '2026-09-01', '2026-10-02', 'rounding', 'd0000000-0000-4000-8000-00000000000c'),
    (12, 'a0000000-0000-4000-8000-000000000001', 'adjustment', '2026-10-01', '2026-10-03', 'a refund', 'd0000000-0000-4000-8000-00000000000e');
SELECT setval(pg_get_serial_sequence('ledger_transactions', 'id'), 12);
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos)
SELECT n, a.id, picos FROM (VALUES
    (8, 'prepaid_credit', -1000000000000000000), (8, 'credit_funding', 1000000000000000000),
    (9, 'receivable', 1500000), (9, 'adjustment', -1500000), (10, 'receivable', -5), (10, 'prepaid_credit', 5),
    (11, 'receivable', 398500005), (11, 'rounding', -398500005), (12, 'receivable', -10000000000), (12, 'adjustment', 10000000000)
) AS leg (n, kind, picos) JOIN ledger_accounts a USING (kind) WHERE a.organization_id = 'a0000000-0000-4000-8000-000000000001';
INSERT INTO ledger_entries (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
SELECT r.n, a.id, leg.amount, leg.kind, leg.tokens, CASE WHEN leg.kind IS NOT NULL THEN r.version END
FROM requests r JOIN price_versions p ON p.id = r.version,
     LATERAL (VALUES
        ('receivable', (sent - cached) * p.input_picos_per_token + cached * p.cached_input_picos_per_token
             + delivered * p.output_picos_per_token, NULL, NULL::bigint),
        ('revenue', -(sent - cached) * p.input_picos_per_token, 'input', (sent - cached)::bigint),
        ('revenue', -cached * p.cached_input_picos_per_token, 'cached_input', cached::bigint),
        ('revenue', -delivered * p.output_picos_per_token, 'output', delivered::bigint)) AS leg (account, amount, kind, tokens)
     JOIN ledger_accounts a ON a.kind = leg.account
WHERE r.n IN (1, 2, 7) AND a.organization_id = r.organization_id AND coalesce(leg.tokens, 1) > 0;
UPDATE usage_events u SET rated_at = '2026-10-06', ledger_transaction_id = r.n FROM requests r WHERE r.id = u.hold_id AND r.n IN (1, 2, 7);
DELETE FROM unrated_usage w USING requests r WHERE r.id = w.hold_id AND r.n IN (1, 2, 7, 8);

INSERT INTO plan_versions (id, name, version, currency_code, rules) OVERRIDING SYSTEM VALUE VALUES (1, 'starter', 1, 'USD', '{}');
SELECT setval(pg_get_serial_sequence('plan_versions', 'id'), 1);
INSERT INTO plan_assignments (organization_id, first_month, plan_version_id, assigned_by)
VALUES ('a0000000-0000-4000-8000-000000000001', '2026-09-01', 1, 'ann');
INSERT INTO credit_grants (id, organization_id, currency_code, amount_picos, first_month, last_month, reason, granted_by)
VALUES ('d0000000-0000-4000-8000-00000000000b', 'a0000000-0000-4000-8000-000000000001', 'USD', 1000000000000000000, '2026-09-01',
        '2026-12-01', 'paid', 'ann');
INSERT INTO credit_applications (grant_id, billing_month, amount_picos)
VALUES ('d0000000-0000-4000-8000-00000000000b', '2026-09-01', 5);
INSERT INTO billing_months (organization_id, month, state, closing_at, closing_by, closed_at, closed_by) VALUES
    ('a0000000-0000-4000-8000-000000000001', '2026-09-01', 'closed', '2026-10-02', 'ann', '2026-10-02', 'ann'),
    ('a0000000-0000-4000-8000-000000000001', '2026-10-01', 'closing', '2026-11-02', 'ann', NULL, NULL);
INSERT INTO month_closings (organization_id, month, organization_name, currency_code, carried_in_picos, report_format, json_sha256,
                            csv_sha256, receipts_root, billing_profile)
VALUES ('a0000000-0000-4000-8000-000000000001', '2026-09-01', 'acme', 'USD', 0, 2, sha256('json'), sha256('csv'), 'ab',
        '{"legal_name": "Acme GmbH"}');
INSERT INTO document_series (series, last_ordinal) VALUES ('INV', 1), ('CN', 1);
INSERT INTO invoices (id, ordinal, number, organization_id, month, organization_name, currency_code, issued_at, issued_by, line_count,
                      exact_picos, carried_in_picos, carried_out_picos, total_picos)
VALUES ('d0000000-0000-4000-8000-00000000000c', 1, 'INV-000001', 'a0000000-0000-4000-8000-000000000001', '2026-09-01', 'acme', 'USD',
        '2026-10-02', 'ann', 5, 39601499995, 0, -398500005, 40000000000);
INSERT INTO invoice_lines (invoice_id, position, kind, description, exact_picos, amount_picos, model, price_version_id, token_kind,
                           token_count, unit_price_picos, usage_month, source_id) VALUES
    ('d0000000-0000-4000-8000-00000000000c', 0, 'usage', 'demo, input', 9000000000, 10000000000, 'demo', 1, 'input', 60000, 150000,
     '2026-09', NULL),
    ('d0000000-0000-4000-8000-00000000000c', 1, 'usage', 'demo, cached input', 600000000, 0, 'demo', 1, 'cached_input', 40000, 15000,
     '2026-09', NULL),
    ('d0000000-0000-4000-8000-00000000000c', 2, 'usage', 'demo, output', 30000000000, 30000000000, 'demo', 1, 'output', 50000, 600000,
     '2026-09', NULL),
    ('d0000000-0000-4000-8000-00000000000c', 3, 'adjustment', 'adjustment: misstated usage', 1500000, 0, '', NULL, NULL, NULL, NULL, '',
     'd0000000-0000-4000-8000-00000000000d'),
    ('d0000000-0000-4000-8000-00000000000c', 4, 'credit', 'credit: paid', -5, 0, '', NULL, NULL, NULL, NULL, '',
     'd0000000-0000-4000-8000-00000000000b');
INSERT INTO invoice_letterheads (invoice_id, name, address, tax_id, contact, payment)
VALUES ('d0000000-0000-4000-8000-00000000000c', 'Weir Ltd', '{"1 Mill Lane",Leeds}', 'GB1', 'bills@weir.example', '{IBAN}');
INSERT INTO adjustments (id, organization_id, invoice_id, currency_code, amount_picos, reason, author) VALUES
    ('d0000000-0000-4000-8000-00000000000d', 'a0000000-0000-4000-8000-000000000001', NULL, 'USD', 1500000, 'misstated usage',
     'ann'),
    ('d0000000-0000-4000-8000-00000000000e', 'a0000000-0000-4000-8000-000000000001', 'd0000000-0000-4000-8000-00000000000c', 'USD',
     -10000000000, 'a refund', 'ann');
INSERT INTO adjustment_decisions (adjustment_id, author, approved, decided_by, billing_month, credit_note_ordinal, credit_note_number)
VALUES ('d0000000-0000-4000-8000-00000000000d', 'ann', true, 'bob', '2026-09-01', NULL, NULL),
       ('d0000000-0000-4000-8000-00000000000e', 'ann', true, 'bob', '2026-10-01', 1, 'CN-000001');
INSERT INTO usage_corrections (hold_id, part, settled_at, adjustment_id, corrected_by)
VALUES ('f0000000-0000-4000-8000-000000000008', 0, '2026-09-20 12:00+00', 'd0000000-0000-4000-8000-00000000000d', 'ann');
INSERT INTO billing_profiles (organization_id, emails, legal_name, address_line1, address_line2, city, postal_code, state, country,
                              tax_id, language)
VALUES ('a0000000-0000-4000-8000-000000000001', '{bills@acme.example}', 'Acme GmbH', 'Weg 1', '', 'Ulm', '89073', '', 'DE', 'DE1', 'de');

INSERT INTO stripe_late_items (id, organization_id, currency_code, period_start, period_end, token_count, exact_picos,
                               carried_in_picos, amount_minor, stripe_id)
VALUES ('d0000000-0000-4000-8000-00000000000f', 'a0000000-0000-4000-8000-000000000001', 'USD', '2026-09-01', '2026-10-01', 50000,
        30000000000, 0, 3, 'ii_1');
INSERT INTO meter_batches (organization_id, price_version_id, token_kind, hour, part, token_count, state, sent_at, delivered_at,
                           late_item_id) VALUES
    ('a0000000-0000-4000-8000-000000000001', 1, 'input', '2026-09-30 23:00+00', 0, 60000, 'delivered', '2026-10-01', '2026-10-01', NULL),
    ('a0000000-0000-4000-8000-000000000001', 1, 'cached_input', '2026-09-30 23:00+00', 0, 40000, 'sent', '2026-10-01', NULL, NULL),
    ('a0000000-0000-4000-8000-000000000001', 1, 'output', '2026-09-30 23:00+00', 0, 50000, 'delivered', '2026-10-01', '2026-10-01',
     'd0000000-0000-4000-8000-00000000000f'),
    ('a0000000-0000-4000-8000-000000000001', 2, 'input', '2026-10-01 00:00+00', 0, 20, 'pending', NULL, NULL, NULL),
    ('a0000000-0000-4000-8000-000000000001', 2, 'output', '2026-10-01 00:00+00', 0, 30, 'pending', NULL, NULL, NULL);
INSERT INTO export_progress (id, closed_until, scanned_until, late_items_since) VALUES (1, '2026-10-01 01:00+00', '2026-10-01', '2026-09-01')
ON CONFLICT (id) DO UPDATE SET closed_until = excluded.closed_until;
INSERT INTO stripe_events (id, type, payload, handled_at, outcome) VALUES ('evt_1', 'invoice.paid', '{"id": "evt_1"}', '2026-10-03', 'paid');
INSERT INTO stripe_invoices (id, organization_id, customer_id, currency_code, period_start, period_end, amount_due_minor,
                             amount_paid_minor, finalized_at, paid_at, last_event_at, total_minor, stripe_number, hosted_url)
VALUES ('in_1', 'a0000000-0000-4000-8000-000000000001', 'cus_1', 'USD', '2026-09-01', '2026-10-01', 4, 4, '2026-10-02', '2026-10-03',
        '2026-10-03', 4, 'ACME-0001', 'https://invoice.stripe.com/i/1');
INSERT INTO stripe_month_settlements (organization_id, month, currency_code, due_picos, carried_in_picos, due_minor, invoiced_minor,
                                      late_minor, settled_at)
VALUES ('a0000000-0000-4000-8000-000000000001', '2026-09-01', 'USD', 40000000000, 0, 4, 0, 3, '2026-10-03');
INSERT INTO stripe_month_items (organization_id, month, position, description, amount_minor, stripe_id, invoice_stripe_id)
VALUES ('a0000000-0000-4000-8000-000000000001', '2026-09-01', 0, 'invoice INV-000001', 1, 'ii_2', 'in_1');
INSERT INTO stripe_objects (account, kind, ref, stripe_id) VALUES ('acct_1', 'customer', 'acme', 'cus_1');
INSERT INTO cancel_commands (api_key_id, reason)
VALUES ('c0000000-0000-4000-8000-000000000003', 'key revoked');
INSERT INTO cancel_commands (changed_key_id, allowed_networks, ended_secrets, reason)
VALUES ('c0000000-0000-4000-8000-000000000002', '{203.0.113.0/24}', ARRAY[sha256('0')], 'key changed');
INSERT INTO replica_drains (model, replica, reason, move_after_ms) VALUES ('demo', 'demo-1', 'a new driver', 30000);
INSERT INTO worker_incidents (source, incident_count) VALUES ('rating', 2);
INSERT INTO alerts (id, organization_id, quota_id, window_start, threshold, limit_value, used) VALUES
    ('d0000000-0000-4000-8000-000000000011', 'a0000000-0000-4000-8000-000000000001', 'e0000000-0000-4000-8000-000000000001', '2026-09-01',
     50, 400000, 225010);
INSERT INTO alerts (id, organization_id, stripe_invoice_id, invoice_event, invoice) VALUES
    ('d0000000-0000-4000-8000-000000000012', 'a0000000-0000-4000-8000-000000000001', 'in_1', 'invoice_paid', '{"number": "ACME-0001"}');
INSERT INTO alert_webhooks (organization_id, url, secret)
VALUES ('a0000000-0000-4000-8000-000000000001', 'https://acme.example/alerts', 'whsec_1');
INSERT INTO alert_deliveries (alert_id, organization_id, state, attempt_count, ended_at) VALUES
    ('d0000000-0000-4000-8000-000000000011', 'a0000000-0000-4000-8000-000000000001', 'delivered', 2, '2026-09-30'),
    ('d0000000-0000-4000-8000-000000000012', 'a0000000-0000-4000-8000-000000000001', 'pending', 0, NULL);
INSERT INTO live_reports (process_id, process_name, reported_at, requests, peer_address, replicas)
VALUES ('d0000000-0000-4000-8000-000000000001', 'host:1', '2026-11-05 12:00+00', '[]', '10.0.0.1:7001', '[]');
DROP TABLE requests, receipts;
SELECT create_usage_partitions(3);  -- as the worker does
