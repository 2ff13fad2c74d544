// Prices in force, plans, and prepaid credit of an organization.

import type {
  CreditGrantJson,
  GetCreditBalanceResponseJson,
  PlanAssignmentJson,
  PlanJson,
} from "../gen/weir/v1/plans_pb.js";
import type { AppliedPriceJson } from "../gen/weir/v1/prices_pb.js";
import { amount, count, decimal, PICOS, minorDigits, money, perMillion, words } from "../format.js";
import { CreditChanges, PlanChanges, SetPrice, WithdrawPrice } from "./price-changes.js";
import { Badge, Command, Id, Note, Problem, Tile, Tiles, Time } from "../parts/basics.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, tried, useLoaded, useView } from "../view.js";
import type { Page, Tried } from "../view.js";

const PRICES = "AdminService/ListPrices";
const GRANTS = "AdminService/ListCreditGrants";
const BALANCE = "AdminService/GetCreditBalance";
const PLANS = "AdminService/ListPlans";
const t = text.prices;

export const prices: Page = {
  id: "prices",
  title: text.pages.prices,
  calls: [PRICES, GRANTS, PLANS],
  Show: Prices,
};

function Prices() {
  const view = useView();
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const organization = chosen.ref;
    const [applied, balance, grants, plans] = await Promise.all([
      view.may(PRICES) ? tried(caller(PRICES, { organization })) : null,
      view.may(BALANCE) ? tried(caller(BALANCE, { organization })) : null,
      view.may(GRANTS) ? tried(caller(GRANTS, { organization })) : null,
      view.may(PLANS) ? tried(caller(PLANS, { organization })) : null,
    ]);
    return { chosen, applied, balance, grants, plans };
  });
  return (
    <Show of={found}>
      {({ chosen, applied, balance, grants, plans }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <SetPrice chosen={chosen} reload={found.reload} />
          </div>
          {applied && (
            <>
              <h2>{t.prices}</h2>
              {"error" in applied ? (
                <Problem of={applied.error} />
              ) : (
                <Table
                  caption={t.prices}
                  columns={[
                    ...priceColumns(),
                    ...(view.may("AdminService/WithdrawPrice")
                      ? [
                          column<AppliedPriceJson>(
                            text.change,
                            (each) =>
                              each.source === "SOURCE_ORGANIZATION" &&
                              each.tier !== "SERVICE_TIER_BATCH" && (
                                <WithdrawPrice of={each} chosen={chosen} reload={found.reload} />
                              ),
                          ),
                        ]
                      : []),
                  ]}
                  rows={applied.value.prices}
                  empty={t.none}
                  keyOf={(each) => `${each.model} ${each.tier}`}
                />
              )}
              <Note>{t.note}</Note>
            </>
          )}
          {balance && <Balance of={balance} />}
          {balance && "value" in balance && (
            <CreditChanges
              chosen={chosen}
              isPrepaid={balance.value.prepaid ?? false}
              reload={found.reload}
            />
          )}
          {grants && (
            <>
              <h2>{t.grants}</h2>
              {"error" in grants ? (
                <Problem of={grants.error} />
              ) : (
                <Table
                  caption={t.grants}
                  columns={grantColumns()}
                  rows={grants.value.grants}
                  empty={t.noGrants}
                  keyOf={(each) => each.grantId}
                />
              )}
            </>
          )}
          {plans && <Plans of={plans} currency={chosen.currency} />}
          {plans && "value" in plans && (
            <PlanChanges chosen={chosen} plans={plans.value.plans ?? []} reload={found.reload} />
          )}
          <Command>{`weir price list --org ${chosen.name || "ORG"}`}</Command>
        </>
      )}
    </Show>
  );
}

function priceColumns() {
  const price = (
    head: string,
    name:
      | "inputPicosPerToken"
      | "cachedInputPicosPerToken"
      | "outputPicosPerToken"
      | "reasoningPicosPerToken"
      | "embeddingPicosPerToken",
  ) => column<AppliedPriceJson>(head, (each) => perMillion(each.version?.[name]), true);
  return [
    column<AppliedPriceJson>(text.model, (each) => each.model),
    column<AppliedPriceJson>(t.tier, (each) => words(each.tier, "SERVICE_TIER_")),
    column<AppliedPriceJson>(t.source, (each) => (
      <Badge kind={each.source === "SOURCE_ORGANIZATION" ? "good" : ""}>
        {each.source === "SOURCE_ORGANIZATION" ? t.own : t.list}
      </Badge>
    )),
    column<AppliedPriceJson>(t.version, (each) => `v${each.version?.version ?? "0"}`),
    price(text.tokens.input, "inputPicosPerToken"),
    price(text.tokens.cached, "cachedInputPicosPerToken"),
    price(text.tokens.output, "outputPicosPerToken"),
    price(text.tokens.thinking, "reasoningPicosPerToken"),
    price(text.tokens.embedded, "embeddingPicosPerToken"),
    column<AppliedPriceJson>(t.currency, (each) => each.version?.currencyCode),
    column<AppliedPriceJson>(t.since, (each) => <Time of={each.version?.effectiveTime} />),
  ];
}

function Balance({ of }: { of: Tried<GetCreditBalanceResponseJson> }) {
  if ("error" in of) return <Problem of={of.error} />;
  const { prepaid, remaining, unbilled, held, available } = of.value;
  return (
    <>
      <h2>{t.credit}</h2>
      <Tiles>
        <Tile
          name={t.available}
          value={amount(available)}
          unit={available?.currencyCode}
          note={prepaid ? t.isPrepaid : t.isPostpaid}
        />
        <Tile name={t.remaining} value={amount(remaining)} unit={remaining?.currencyCode} />
        <Tile name={t.unbilled} value={amount(unbilled)} unit={unbilled?.currencyCode} />
        <Tile name={t.held} value={amount(held)} unit={held?.currencyCode} />
      </Tiles>
    </>
  );
}

function grantColumns() {
  return [
    column<CreditGrantJson>(t.granted, (each) => <Time of={each.createTime} />),
    column<CreditGrantJson>(t.by, (each) => <Id of={each.grantedBy} />),
    column<CreditGrantJson>(t.validFor, (each) =>
      t.months(each.firstMonth ?? "", each.lastMonth ?? ""),
    ),
    column<CreditGrantJson>(t.reason, (each) => each.reason),
    column<CreditGrantJson>(t.amount, (each) => money(each.amount), true),
    column<CreditGrantJson>(t.spent, (each) => money(each.spent), true),
    column<CreditGrantJson>(t.expired, (each) => money(each.expired), true),
    column<CreditGrantJson>(t.remaining, (each) => money(each.remaining), true),
  ];
}

function Plans({
  of,
  currency,
}: {
  of: Tried<{ plans?: PlanJson[]; assignments?: PlanAssignmentJson[] }>;
  currency: string;
}) {
  if ("error" in of) return <Problem of={of.error} />;
  return (
    <>
      <h2>{t.plans}</h2>
      <Table
        caption={t.assigned}
        columns={[
          column<PlanAssignmentJson>(t.from, (each) => each.firstMonth),
          column<PlanAssignmentJson>(t.plan, (each) =>
            each.plan ? `${each.plan} v${each.version}` : t.noPlan,
          ),
          column<PlanAssignmentJson>(t.by, (each) => <Id of={each.assignedBy} />),
        ]}
        rows={of.value.assignments}
        empty={t.noAssignment}
        keyOf={(each) => each.firstMonth}
      />
      <Table
        caption={t.plans}
        columns={[
          column<PlanJson>(t.plan, (each) => `${each.configuration?.name} v${each.version}`),
          column<PlanJson>(
            t.commitment,
            (each) =>
              decimal(
                each.configuration?.commitmentPicos,
                PICOS,
                minorDigits(each.configuration?.currencyCode ?? currency),
              ),
            true,
          ),
          column<PlanJson>(t.currency, (each) => each.configuration?.currencyCode),
          column<PlanJson>(t.allowances, (each) =>
            each.configuration?.allowances?.map(({ selector, tokenCount }, index) => (
              <Note key={index}>
                {t.allowance(count(tokenCount), selector?.tokenKind ?? "", selector?.model ?? "")}
              </Note>
            )),
          ),
          column<PlanJson>(t.since, (each) => <Time of={each.createTime} />),
        ]}
        rows={of.value.plans}
        empty={t.noPlans}
        keyOf={(each) => `${each.configuration?.name} ${each.version}`}
      />
    </>
  );
}
