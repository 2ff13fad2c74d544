"""Files of proposed prices and plans, and commands about plans, credit and simulations."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from weir.v1 import plans_pb2, types_pb2

from tests.cli.conftest import Run, ScriptedWeir, rows

FILE = """
prices:
- {model: demo, input: 0.10, cached_input: 0.05, output: 0.4, batch_multiplier: 0.5}
plans:
- name: growth
  commitment: 250.00
  organizations: [acme]
  allowances:
  - {tokens: 1_000_000, token_kind: output, tier: batch}
  tiered_prices:
  - kind: graduated
    model: demo
    token_kind: output
    steps: [{up_to: 5_000_000, share: 0.9}, {price: 0.3}]
"""


def money(units: int, picos: int = 0) -> types_pb2.Money:
    return types_pb2.Money(currency_code="USD", units=units, picos=picos)


def test_a_month_is_simulated_with_the_prices_and_plans_of_a_file(
    weir: Run, server: ScriptedWeir, tmp_path: Path
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(FILE)
    server.accounts.replies["SimulatePrices"] = plans_pb2.SimulatePricesResponse(
        customers=[
            plans_pb2.SimulatedCustomer(
                organization_id="o1",
                organization_name="acme",
                token_count=1_000_000,
                old_amount=money(200, 5 * 10**11),
                new_amount=money(100, 25 * 10**10),
                difference=money(-100, -25 * 10**10),
                new_plan="growth",
            )
        ]
    )

    shown = weir("price", "simulate", "2026-10", "--prices", str(file), "--org", "acme")
    as_csv = weir("price", "simulate", "2026-10", "--prices", str(file), "--csv")
    as_json = weir("price", "simulate", "2026-10", "--prices", str(file), "--json")

    request = server.accounts.requests[0]
    assert (request.month, request.organization) == ("2026-10", "acme")
    assert request.prices[0].output_picos_per_token == 400_000
    assert request.prices[0].batch_multiplier_milli == 500
    [sent] = request.plans
    assert (sent.commitment_picos, list(sent.organizations)) == (250 * 10**12, ["acme"])
    assert (sent.allowances[0].token_count, sent.allowances[0].selector.tier) == (1_000_000, 2)
    steps = sent.tiered_prices[0].steps
    assert steps[0].up_to_token_count == 5_000_000
    assert steps[0].price_milli == 900
    assert steps[0].HasField("price_picos") is False
    assert (steps[1].price_picos, steps[1].HasField("up_to_token_count")) == (300_000, False)
    assert "acme 1,000,000 200.50 USD 100.25 -100.25 -50.0 none → growth" in rows(shown.stdout)
    [row] = csv.DictReader(as_csv.stdout.splitlines())
    assert row["old_amount"] == "200.50"
    assert row["difference"] == "-100.25"
    assert row["new_plan"] == "growth"
    assert json.loads(as_json.stdout)[0]["difference"]["picos"] == -100_250_000_000_000


def test_every_mistake_of_a_file_is_reported_by_line(weir: Run, tmp_path: Path) -> None:
    file = tmp_path / "plans.yaml"
    file.write_text(
        "plans:\n- name: growth\n  allowances:\n  - {tokens: 0.5}\n  - {model: m}\n  commitment:"
        " -1\n"
    )

    refused = weir("plan", "create", str(file))

    assert refused.exit_code == 2
    lines = refused.stderr.splitlines()
    assert [line.split(":")[1] for line in lines if str(file) in line] == ["4", "5", "6"]


def test_credit_is_granted_in_units_and_listed(weir: Run, server: ScriptedWeir) -> None:
    grant = plans_pb2.CreditGrant(
        grant_id="g1",
        organization_name="acme",
        amount=money(500),
        remaining=money(500),
        first_month="2026-11",
        last_month="2026-12",
    )
    server.accounts.replies |= {
        "GrantCredit": plans_pb2.GrantCreditResponse(grant=grant),
        "ListCreditGrants": plans_pb2.ListCreditGrantsResponse(grants=[grant]),
        "GetCreditBalance": plans_pb2.GetCreditBalanceResponse(
            organization_name="acme", prepaid=True, available=money(7)
        ),
        "SetPrepaid": plans_pb2.SetPrepaidResponse(),
        "AssignPlan": plans_pb2.AssignPlanResponse(
            assignment=plans_pb2.PlanAssignment(
                organization_name="acme", first_month="2026-12", plan="growth", version=2
            )
        ),
    }

    granted = weir("credit grant acme 500.00 --until 2026-12 --reason paid")

    request = server.accounts.requests[-1]
    assert request.amount_picos == 500 * 10**12
    assert request.last_month == "2026-12"
    assert request.reason == "paid"
    assert len(request.request_id) == 36
    assert "500.00 USD" in granted.stdout
    assert weir("credit grant acme much --until 2026-12 --reason paid").exit_code == 2
    assert "g1" in weir("credit list --org acme").stdout
    assert "7.00 USD" in weir("credit balance acme").stdout
    assert "acme is limited to its credit" in weir("credit prepaid acme --only").stderr
    assert (
        "acme has the plan growth version 2 from 2026-12 on"
        in weir("plan assign acme growth --from 2026-12").stderr
    )
