// Changes of prices, credit and plans. A price can be tried on a past month before it applies.

import type { AppliedPriceJson } from "../gen/weir/v1/prices_pb.js";
import type {
  PlanJson,
  SimulatedCustomerJson,
  SimulatedModelJson,
} from "../gen/weir/v1/plans_pb.js";
import { call } from "../client.js";
import { amount, amountPlaces, count, monthOf, percentChange, scaled, sumOf } from "../format.js";
import type { AnyMoney } from "../format.js";
import { Action, Unusable, digits, exactly, perToken, timeOf } from "../parts/actions.js";
import type { Asked, Outcome, Values } from "../parts/actions.js";
import { Name } from "../parts/basics.js";
import type { Chosen } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";

const SIMULATE = "AdminService/SimulatePrices";
const MONTHS_BACK = [1, 0, 2, 3]; // the last one first
const SHARE_DIGITS = 3;
const t = text.priceChanges;

export function SetPrice({ chosen, reload }: { chosen: Chosen; reload: () => void }) {
  const now = new Date();
  const fields: Asked[] = [
    { name: "model", label: text.model, isRequired: true },
    {
      name: "organization",
      label: t.whose,
      options: [
        ["", t.list],
        [chosen.ref, t.own(chosen.name)],
      ],
    },
    price("input_picos_per_token", text.tokens.input, chosen.currency),
    price("cached_input_picos_per_token", text.tokens.cached, chosen.currency),
    price("output_picos_per_token", text.tokens.output, chosen.currency),
    {
      name: "reasoning_picos_per_token",
      label: t.perMillion(text.tokens.thinking, chosen.currency),
      help: t.thinkingHelp,
    },
    {
      name: "embedding_picos_per_token",
      label: t.perMillion(text.tokens.embedded, chosen.currency),
      help: t.unchanged,
    },
    { name: "batch_multiplier_milli", label: t.batch, help: t.batchHelp },
    { name: "effective_time", label: t.from, help: t.fromHelp, type: "datetime-local" },
  ];
  return (
    <Action
      call="AdminService/SetPrice"
      label={t.set}
      title={t.set}
      explanation={t.setExplanation}
      act={t.set}
      isPrimary
      fields={fields}
      trial={{
        call: SIMULATE,
        label: t.simulate,
        fields: [
          {
            name: "month",
            label: text.month,
            options: MONTHS_BACK.map((back) => [monthOf(now, back), monthOf(now, back)]),
          },
        ],
        run: (values) => simulated(values, chosen),
      }}
      request={(values, requestId) => ({
        ...terms(values, chosen),
        ...(values["effective_time"]
          ? { effectiveTime: timeOf("effective_time", values["effective_time"]) }
          : {}),
        requestId,
      })}
      done={({ version }) => t.isSet(version ?? "")}
      changed={reload}
    />
  );
}

function price(name: string, kind: string, currency: string): Asked {
  return { name, label: t.perMillion(kind, currency), isRequired: true };
}

// The entered prices, in picos per token. What is left out stays unchanged.
function terms(values: Values, { currency }: Chosen) {
  const optional = (name: string, field: string) =>
    values[name] ? { [field]: perToken(name, values[name]) } : {};
  return {
    model: values["model"] ?? "",
    organization: values["organization"] ?? "",
    currencyCode: currency,
    inputPicosPerToken: perToken("input_picos_per_token", values["input_picos_per_token"]),
    cachedInputPicosPerToken: perToken(
      "cached_input_picos_per_token",
      values["cached_input_picos_per_token"],
    ),
    outputPicosPerToken: perToken("output_picos_per_token", values["output_picos_per_token"]),
    ...optional("reasoning_picos_per_token", "reasoningPicosPerToken"),
    ...optional("embedding_picos_per_token", "embeddingPicosPerToken"),
    ...(values["batch_multiplier_milli"]
      ? { batchMultiplierMilli: share(values["batch_multiplier_milli"]) }
      : {}),
  };
}

function share(entered: string): string {
  const milli = scaled(digits(entered), SHARE_DIGITS);
  if (milli === null) throw new Unusable("batch_multiplier_milli", t.notAShare(entered));
  return milli;
}

// What the month would have cost. The server rates it; here amounts of a model are added.
async function simulated(values: Values, chosen: Chosen): Promise<Outcome> {
  const month = values["month"] ?? "";
  const { customers = [] } = await call(SIMULATE, {
    month,
    organization: values["organization"] ?? "",
    prices: [terms(values, chosen)],
  });
  const concerned = customers.filter((each) => each.oldAmount?.currencyCode === chosen.currency);
  if (concerned.length === 0) return { summary: t.noUsage(month), detail: null };
  const changed = concerned.filter((each) => sign(each.difference) !== 0n);
  return {
    summary: t.summary(month, count(changed.length), count(concerned.length)),
    detail: (
      <>
        <Table
          caption={t.byModel}
          columns={[
            column<ModelAmounts>(text.model, (each) => each.model || t.allModels),
            ...amountColumns<ModelAmounts>(chosen.currency, byModel(concerned)),
          ]}
          rows={byModel(concerned)}
          isGrid
          keyOf={(each) => each.model}
        />
        <Table
          caption={t.byOrganization}
          columns={[
            column<SimulatedCustomerJson>(text.organization, (each) => (
              <Name of={each.organizationName} />
            )),
            ...amountColumns<SimulatedCustomerJson>(chosen.currency, concerned),
          ]}
          rows={concerned}
          isGrid
          keyOf={(each) => each.organizationId}
        />
      </>
    ),
  };
}

interface Amounts {
  tokenCount?: string;
  oldAmount?: AnyMoney;
  newAmount?: AnyMoney;
  difference?: AnyMoney;
}

interface ModelAmounts extends Amounts {
  model: string;
}

function sign(money: AnyMoney): bigint {
  return sumOf([money]).picos;
}

// Models of several organizations, each once.
export function byModel(customers: SimulatedCustomerJson[]): ModelAmounts[] {
  const models = new Map<string, SimulatedModelJson[]>();
  for (const each of customers.flatMap((customer) => customer.models ?? [])) {
    const name = each.model ?? "";
    models.set(name, [...(models.get(name) ?? []), each]);
  }
  return [...models].map(([model, parts]) => ({
    model,
    tokenCount: String(parts.reduce((sum, each) => sum + BigInt(each.tokenCount ?? 0), 0n)),
    oldAmount: sumOf(parts.map((each) => each.oldAmount)),
    newAmount: sumOf(parts.map((each) => each.newAmount)),
    difference: sumOf(parts.map((each) => each.difference)),
  }));
}

function amountColumns<Row extends Amounts>(currency: string, rows: Amounts[]) {
  const least = amountPlaces(
    rows.flatMap((each) => [each.oldAmount, each.newAmount, each.difference]),
  );
  return [
    column<Row>(t.tokens, (each) => count(each.tokenCount), true),
    column<Row>(t.paid(currency), (each) => amount(each.oldAmount, least), true),
    column<Row>(t.wouldPay(currency), (each) => amount(each.newAmount, least), true),
    column<Row>(t.difference(currency), (each) => amount(each.difference, least), true),
    column<Row>(
      t.percent,
      (each) => percentChange(sign(each.oldAmount), sign(each.newAmount)),
      true,
    ),
  ];
}

// Ends the organization's own price of a model, in all tiers.
export function WithdrawPrice({
  of: { model = "" },
  chosen,
  reload,
}: {
  of: AppliedPriceJson;
  chosen: Chosen;
  reload: () => void;
}) {
  return (
    <Action
      call="AdminService/WithdrawPrice"
      label={t.withdraw}
      about={model}
      title={t.withdrawTitle(model, chosen.name)}
      explanation={t.withdrawExplanation}
      act={t.withdraw}
      isDanger
      fields={[{ name: "effective_time", label: t.from, help: t.fromHelp, type: "datetime-local" }]}
      request={(values, requestId) => ({
        organization: chosen.ref,
        model,
        ...(values["effective_time"]
          ? { effectiveTime: timeOf("effective_time", values["effective_time"]) }
          : {}),
        requestId,
      })}
      done={() => t.isWithdrawn(model)}
      changed={reload}
    />
  );
}

export function CreditChanges({
  chosen,
  isPrepaid,
  reload,
}: {
  chosen: Chosen;
  isPrepaid: boolean;
  reload: () => void;
}) {
  const organization = chosen.ref;
  return (
    <div className="buttons">
      <Action
        call="AdminService/GrantCredit"
        label={t.grant}
        title={t.grantTitle(chosen.name)}
        act={t.grant}
        fields={[
          { name: "amount_picos", label: t.amountIn(chosen.currency), isRequired: true },
          { name: "first_month", label: t.firstMonth, help: t.thisMonth, placeholder: "2026-12" },
          { name: "last_month", label: t.lastMonth, placeholder: "2027-12", isRequired: true },
          { name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true },
        ]}
        request={(values, requestId) => ({
          organization,
          amountPicos: exactly("amount_picos", values["amount_picos"]),
          firstMonth: values["first_month"] ?? "",
          lastMonth: values["last_month"] ?? "",
          reason: values["reason"] ?? "",
          requestId,
        })}
        done={({ grant }) => t.isGranted(`${amount(grant?.amount)} ${chosen.currency}`)}
        changed={reload}
      />
      <Action
        call="AdminService/SetPrepaid"
        label={isPrepaid ? t.arrears : t.prepaid}
        title={isPrepaid ? t.arrearsTitle(chosen.name) : t.prepaidTitle(chosen.name)}
        explanation={isPrepaid ? t.arrearsExplanation : t.prepaidExplanation}
        act={isPrepaid ? t.arrears : t.prepaid}
        isDanger={!isPrepaid}
        request={() => ({ organization, prepaid: !isPrepaid })}
        done={() => (isPrepaid ? t.isInArrears(chosen.name) : t.isPrepaid(chosen.name))}
        changed={reload}
      />
    </div>
  );
}

export function PlanChanges({
  chosen,
  plans,
  reload,
}: {
  chosen: Chosen;
  plans: PlanJson[];
  reload: () => void;
}) {
  const names = plans
    .filter(({ configuration }) => configuration?.currencyCode === chosen.currency)
    .map(({ configuration }) => configuration?.name ?? "");
  return (
    <div className="buttons">
      <Action
        call="AdminService/AssignPlan"
        label={t.assign}
        title={t.assignTitle(chosen.name)}
        explanation={t.assignExplanation}
        act={t.assign}
        fields={[
          {
            name: "plan",
            label: t.plan,
            options: [
              ["", t.noPlan],
              ...[...new Set(names)].map((each): [string, string] => [each, each]),
            ],
          },
          { name: "first_month", label: t.firstMonth, help: t.thisMonth, placeholder: "2026-12" },
        ]}
        request={(values) => ({
          organization: chosen.ref,
          plan: values["plan"] ?? "",
          firstMonth: values["first_month"] ?? "",
        })}
        done={({ assignment }) =>
          t.isAssigned(chosen.name, assignment?.plan ?? "", assignment?.firstMonth ?? "")
        }
        changed={reload}
      />
      <Action
        call="AdminService/CreatePlan"
        label={t.createPlan}
        title={t.createPlan}
        explanation={t.createPlanExplanation}
        act={t.createPlan}
        fields={[
          { name: "name", label: t.planName, help: t.planNameHelp, isRequired: true },
          { name: "commitment", label: t.commitment(chosen.currency), help: t.commitmentHelp },
          { name: "token_count", label: t.included, help: t.includedHelp, type: "number" },
          {
            name: "token_kind",
            label: t.includedKind,
            options: ["", "input", "cached_input", "output", "reasoning", "embedding"].map(
              (each) => [each, each ? each.replaceAll("_", " ") : t.allKinds],
            ),
          },
          { name: "model", label: t.includedModel, help: t.includedModelHelp },
        ]}
        request={(values) => ({
          plan: {
            name: values["name"] ?? "",
            currencyCode: chosen.currency,
            commitmentPicos: exactly("commitment", values["commitment"] || "0"),
            allowances: values["token_count"]
              ? [
                  {
                    selector: {
                      model: values["model"] ?? "",
                      tokenKind: values["token_kind"] ?? "",
                    },
                    tokenCount: digits(values["token_count"]),
                  },
                ]
              : [],
          },
        })}
        done={({ plan, existed }) =>
          t.isCreated(`${plan?.configuration?.name} v${plan?.version}`, existed ?? false)
        }
        changed={reload}
      />
    </div>
  );
}
