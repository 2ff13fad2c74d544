// Limits with their used, held and remaining amounts, reset times and owners; set, override, remove.

import type {
  ApiKeyJson,
  PreviewQuotaResponseJson,
  PreviewedDayJson,
  PreviewedMemberJson,
} from "../gen/weir/v1/admin_service_pb.js";
import type {
  QuotaDimensionJson,
  QuotaStatusJson,
  QuotaSubjectJson,
} from "../gen/weir/v1/types_pb.js";
import { call } from "../client.js";
import { count, dimensionWords, isMoney, limitValue, secondsOf, wait, words } from "../format.js";
import { Action, Unusable, exactly, digits, timeOf } from "../parts/actions.js";
import type { Asked, Outcome, Values } from "../parts/actions.js";
import { AsOf, Badge, Choice, Command, Name, Note, Time } from "../parts/basics.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import type { Chosen } from "../parts/choices.js";
import { Meter } from "../parts/charts.js";
import { Table, column } from "../parts/table.js";
import type { Column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded, useView } from "../view.js";
import type { Page, View } from "../view.js";

const LIST = "AdminService/ListQuotas";
const KEYS_MAX = 100; // to choose from; the page Keys leads to the others
const OWN = "InferenceService/GetQuota";
const PREVIEW = "AdminService/PreviewQuota";
const EVERY_MS = 5000;
const DAY_MS = 86_400_000;
const DAYS = [7, 1, 14, 30]; // of a preview
const COUNTED = ["REQUESTS", "TOKENS", "INPUT_TOKENS", "OUTPUT_TOKENS", "COST_PICOS"];
const WINDOWS = ["MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "WINDOW", "LIFETIME"];
const DIMENSIONS = [
  ...COUNTED.flatMap((counted) =>
    WINDOWS.map((window) => `QUOTA_DIMENSION_${counted}_PER_${window}`),
  ),
  "QUOTA_DIMENSION_CONCURRENT_REQUESTS",
].filter((each) => each !== "QUOTA_DIMENSION_COST_PICOS_PER_MINUTE") as QuotaDimensionJson[];
const t = text.limits;

export const limits: Page = {
  id: "limits",
  title: text.pages.limits,
  calls: [LIST, OWN],
  Show: Limits,
};

function Limits() {
  const view = useView();
  return view.may(LIST) ? <All /> : <Own />;
}

function Own() {
  const view = useView();
  const found = useLoaded((caller) => caller(OWN), [], EVERY_MS);
  return (
    <Show of={found} everyMs={EVERY_MS}>
      {({ quotas }) => (
        <>
          <Table
            caption={t.ofKey}
            columns={limitColumns(view.session.currencyCode)}
            rows={quotas}
            empty={t.none}
            keyOf={(each) => each.quotaId}
          />
          <AsOf />
          <Command>weir quota show</Command>
        </>
      )}
    </Show>
  );
}

function All() {
  const view = useView();
  const chosen = useLoaded(async (caller) => {
    const organization = await organizationOf(caller, view);
    const { apiKeys = [] } = view.may("AdminService/ListApiKeys")
      ? await caller("AdminService/ListApiKeys", {
          organization: organization.ref,
          state: "API_KEY_STATE_VALID",
          pageSize: KEYS_MAX,
        })
      : {};
    return { organization, keys: apiKeys };
  });
  return (
    <Show of={chosen}>
      {({ organization, keys }) => <OfOrganization chosen={organization} keys={keys} />}
    </Show>
  );
}

function OfOrganization({ chosen, keys }: { chosen: Chosen; keys: ApiKeyJson[] }) {
  const view = useView();
  const key = view.asked("key");
  const found = useLoaded(
    (caller) => caller(LIST, key ? { apiKey: key } : { organization: chosen.ref }),
    [chosen.ref, key],
    EVERY_MS,
  );
  const options = keys.map((each): [string, string] => [
    each.prefix ?? "",
    `${each.prefix} (${each.name})`,
  ]);
  const weight = chosen.organization?.queueWeightMilli;
  return (
    <>
      <div className="controls">
        <OrganizationChoice of={chosen} />
        <Choice
          name={t.ofAKey}
          options={[
            ["", t.all],
            ...options,
            ...(key && keys.every((each) => each.prefix !== key)
              ? [[key, key] as [string, string]]
              : []),
          ]}
          value={key}
          onChange={(next) => view.go({ key: next })}
        />
        <SetLimit chosen={chosen} apiKey={key} reload={found.reload} />
      </div>
      <Show of={found} everyMs={EVERY_MS}>
        {({ quotas }) => (
          <>
            <Table
              caption={t.limitsOf(key || chosen.name)}
              columns={[
                ...limitColumns(chosen.currency),
                ...changeColumns(view, chosen.currency, found.reload),
              ]}
              rows={quotas}
              empty={t.none}
              keyOf={(each) => each.quotaId}
            />
            {weight && <Note>{t.weight(chosen.name, String(Number(weight) / 1000))}</Note>}
            <AsOf />
            {keys.length === KEYS_MAX && <Note>{t.newestKeys(count(KEYS_MAX))}</Note>}
            <Command
              what={t.setCommand}
            >{`weir quota set tokens-per-month 1000000 --org ${chosen.name}`}</Command>
            <Command>
              {key ? `weir quota list --key ${key}` : `weir quota list --org ${chosen.name}`}
            </Command>
          </>
        )}
      </Show>
    </>
  );
}

// Entered value of a limit in the integer of the contract: money is in picos of a currency unit.
function valueOf(dimension: string | undefined, entered = ""): string {
  return isMoney(dimension) ? exactly("limit_value", entered) : digits(entered);
}

function SetLimit({
  chosen,
  apiKey,
  reload,
}: {
  chosen: Chosen;
  apiKey: string;
  reload: () => void;
}) {
  const limitOf = (values: Values) => ({
    subject: values["subject"] as QuotaSubjectJson,
    subjectRef: refOf(values["subject"], values["subject_ref"] ?? "", chosen.ref),
    dimension: values["dimension"] as QuotaDimensionJson,
    limitValue: valueOf(values["dimension"], values["limit_value"]),
    ...(values["window_minutes"]
      ? { windowMinutes: Number(digits(values["window_minutes"])) }
      : {}),
    model: values["model"] ?? "",
    forEach: values["for_each"] ?? "",
    endUser: values["end_user"] ?? "",
    label: values["label"] ?? "",
  });
  const fields: Asked[] = [
    {
      name: "subject",
      label: t.on,
      options: [
        ["QUOTA_SUBJECT_ORGANIZATION", t.theOrganization(chosen.name)],
        ["QUOTA_SUBJECT_PROJECT", t.aProject],
        ["QUOTA_SUBJECT_API_KEY", t.aKey],
      ],
      initial: apiKey ? "QUOTA_SUBJECT_API_KEY" : "QUOTA_SUBJECT_ORGANIZATION",
    },
    { name: "subject_ref", label: t.ref, help: t.refHelp, initial: apiKey },
    {
      name: "dimension",
      label: t.what,
      options: DIMENSIONS.map((each) => [
        each,
        dimensionWords(each).replace("per window", t.perWindow),
      ]),
      initial: "QUOTA_DIMENSION_TOKENS_PER_MONTH",
    },
    {
      name: "limit_value",
      label: t.limit,
      help: t.limitHelp(chosen.currency),
      type: "number",
      isRequired: true,
    },
    { name: "window_minutes", label: t.minutes, help: t.minutesHelp, type: "number" },
    { name: "model", label: text.model, help: t.modelHelp },
    { name: "for_each", label: t.forEach, help: t.forEachHelp },
    { name: "end_user", label: t.endUser },
    { name: "label", label: t.label, placeholder: "team=search" },
    { name: "for_new_keys", label: t.forNewKeys, help: t.forNewKeysHelp, type: "check" },
    {
      name: "enforced",
      label: t.enforced,
      help: t.enforcedHelp,
      type: "check",
      initial: "true",
    },
  ];
  return (
    <Action
      call="AdminService/SetQuota"
      label={t.set}
      title={t.setTitle}
      act={t.set}
      fields={fields}
      isPrimary
      trial={{
        call: PREVIEW,
        label: t.preview,
        fields: [
          {
            name: "days",
            label: t.previewed,
            options: DAYS.map((each) => [String(each), t.lastDays(each)]),
          },
        ],
        run: async (values) => {
          if (values["for_new_keys"]) throw new Unusable("for_new_keys", t.noPast);
          const startMs = Date.now() - Number(values["days"]) * DAY_MS;
          const startTime = new Date(startMs).toISOString();
          return previewOf(await call(PREVIEW, { ...limitOf(values), startTime }));
        },
      }}
      request={(values) => ({
        ...limitOf(values),
        forNewKeys: values["for_new_keys"] === "true",
        enforced: values["enforced"] === "true",
      })}
      done={({ quota }) =>
        t.isSet(
          `${dimensionWords(quota?.dimension, quota?.windowMinutes)}: ${limitValue(quota?.dimension, quota?.limitValue)}`,
        )
      }
      changed={reload}
    />
  );
}

// What the limit would have refused, by day and by member.
export function previewOf(found: PreviewQuotaResponseJson): Outcome {
  const figures = <Row extends PreviewedDayJson | PreviewedMemberJson>() => [
    column<Row>(t.requestsOf, (each) => count(each.requestCount), true),
    column<Row>(t.refused, (each) => count(each.refusedCount), true),
    column<Row>(t.shortened, (each) => count(each.shortenedCount), true),
  ];
  return {
    summary: t.previewOf(
      count(found.refusedCount),
      count(found.requestCount),
      count(found.shortenedCount),
    ),
    detail: (
      <>
        {found.firstRefusalTime && (
          <Note>
            {t.firstRefusal} <Time of={found.firstRefusalTime} />
          </Note>
        )}
        <Table
          caption={t.byDay}
          columns={[
            column<PreviewedDayJson>(t.day, (each) => each.day),
            ...figures<PreviewedDayJson>(),
          ]}
          rows={found.days}
          empty={t.noRequests}
          isGrid
          keyOf={(each) => each.day}
        />
        {found.memberCount && (
          <>
            <Table
              caption={t.byMember}
              columns={[
                column<PreviewedMemberJson>(t.member, (each) => (
                  <Name of={each.name || text.none} />
                )),
                ...figures<PreviewedMemberJson>(),
              ]}
              rows={found.members}
              isGrid
              keyOf={(each) => each.name}
            />
            <Note>{t.members(count(found.refusedMemberCount), count(found.memberCount))}</Note>
          </>
        )}
        <Note>{t.notRecorded}</Note>
      </>
    ),
  };
}

// Reference of a limit's subject: a project may be given without its organization.
function refOf(subject: string | undefined, entered: string, organization: string): string {
  if (subject === "QUOTA_SUBJECT_ORGANIZATION") return entered || organization;
  return subject === "QUOTA_SUBJECT_PROJECT" && entered && !entered.includes("/")
    ? `${organization}/${entered}`
    : entered;
}

// Buttons of a limit. A limit that the operator has set is changed only by the operator.
function changeColumns(
  view: View,
  currency: string,
  reload: () => void,
): Column<QuotaStatusJson>[] {
  if (!view.may("AdminService/OverrideQuota") && !view.may("AdminService/DeleteQuota")) return [];
  return [
    column(text.change, (each) => {
      if (!view.session.isOperator && !each.setByOrganization) return "";
      if (each.selectorId) return "";
      return <Changes of={each} currency={currency} reload={reload} />;
    }),
  ];
}

function Changes({
  of: quota,
  currency,
  reload,
}: {
  of: QuotaStatusJson;
  currency: string;
  reload: () => void;
}) {
  const { quotaId = "", dimension, windowMinutes } = quota;
  const what = dimensionWords(dimension, windowMinutes);
  const unit = isMoney(dimension) ? currency : unitOf(dimension, currency);
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/OverrideQuota"
        label={t.override}
        about={what}
        title={t.overrideTitle(what)}
        explanation={t.overrideExplanation(
          limitValue(dimension, quota.overrideEndTime ? quota.baseLimitValue : quota.limitValue),
          unit,
        )}
        act={t.override}
        fields={[
          {
            name: "limit_value",
            label: t.temporary(unit),
            type: "number",
            isRequired: true,
          },
          {
            name: "expire_time",
            label: t.until,
            type: "datetime-local",
            isRequired: true,
          },
          { name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true },
        ]}
        request={(values) => ({
          quotaId,
          limitValue: valueOf(dimension, values["limit_value"]),
          expireTime: timeOf("expire_time", values["expire_time"]),
          reason: values["reason"] ?? "",
        })}
        done={() => t.isOverridden(what)}
        changed={reload}
      />
      {quota.overrideEndTime && (
        <Action
          call="AdminService/OverrideQuota"
          label={t.endOverride}
          about={what}
          title={t.endOverrideTitle(what)}
          act={t.endOverride}
          fields={[{ name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true }]}
          request={({ reason = "" }) => ({ quotaId, reason })}
          done={() => t.overrideEnded(what)}
          changed={reload}
        />
      )}
      <Action
        call="AdminService/DeleteQuota"
        label={t.remove}
        about={what}
        title={t.removeTitle(what)}
        explanation={t.removeExplanation}
        act={t.remove}
        isDanger
        request={() => ({ quotaId })}
        done={() => t.isRemoved(what)}
        changed={reload}
      />
    </div>
  );
}

const owner = column<QuotaStatusJson>(t.setOn, (each) => (
  <>
    {each.forNewKeys && t.newKeysOf}
    {eachOf(each)}
    {words(each.subject, "QUOTA_SUBJECT_")}
    <Note>
      <Name of={each.subjectName} />
      {each.withinName && ` ${t.of(each.withinName)}`}
    </Note>
  </>
));

// Columns of limits, with the one that says whom they concern. A selector limits nothing itself: it
// has terms, and nothing used.
export function limitColumns(
  currency: string,
  whose: Column<QuotaStatusJson> = owner,
): Column<QuotaStatusJson>[] {
  return [
    column(t.limitOf, (each) => (
      <>
        {dimensionWords(each.dimension, each.windowMinutes)}
        {each.model && ` ${t.onModel(each.model)}`}
        <Remarks of={each} />
      </>
    )),
    whose,
    column(
      t.usage,
      (each) =>
        !each.forEach && (
          <Meter used={each.usedValue} held={each.heldValue} limit={each.limitValue} />
        ),
    ),
    column(t.used, (each) => !each.forEach && limitValue(each.dimension, each.usedValue), true),
    column(t.held, (each) => !each.forEach && limitValue(each.dimension, each.heldValue), true),
    column(
      t.left,
      (each) => !each.forEach && limitValue(each.dimension, each.remainingValue),
      true,
    ),
    column(
      t.limit,
      (each) => (
        <>
          {limitValue(each.dimension, each.limitValue)}
          <Note>{unitOf(each.dimension, currency)}</Note>
        </>
      ),
      true,
    ),
    column(t.resets, (each) => !each.forEach && <Reset of={each} />),
  ];
}

function Reset({ of: { resetTime, resetDelay, dimension } }: { of: QuotaStatusJson }) {
  if (!resetTime) return /LIFETIME|CREDIT/.test(dimension ?? "") ? t.never : t.asRequestsEnd;
  return (
    <>
      {t.in(wait(secondsOf(resetDelay)))}
      <Note>
        <Time of={resetTime} />
      </Note>
    </>
  );
}

function unitOf(dimension: string | undefined, currency: string): string {
  if (isMoney(dimension)) return currency;
  return /REQUESTS/.test(dimension ?? "") ? t.requests : t.tokens;
}

// What a selector gives its limit to, such as "each key of group free of ".
function eachOf({ forEach }: QuotaStatusJson): string {
  if (!forEach) return "";
  const [kind = "", ...name] = forEach.split(":");
  if (kind === "end_user") return t.eachEndUserOf;
  return kind === "key" ? t.eachKeyOf(name.join(":")) : t.eachOf(kind, name.join(":"));
}

function Remarks({ of: each }: { of: QuotaStatusJson }) {
  const weights = [each.inputWeightMilli, each.cachedInputWeightMilli, each.outputWeightMilli].map(
    (weight) => Number(weight ?? 0),
  );
  const isWeighted = weights.some((weight) => weight) && new Set([...weights, 1000]).size > 1;
  return (
    <div className="badges">
      {each.group && <Badge>{t.byGroup(each.group)}</Badge>}
      {each.binding && <Badge kind="warning">{t.binding}</Badge>}
      {each.narrowedByQuotaId && <Badge>{t.narrowed}</Badge>}
      {each.selectorId && <Badge>{t.bySelector}</Badge>}
      {each.setByOrganization && <Badge>{t.byOrganization}</Badge>}
      {!each.enforced && <Badge>{t.shadow(count(each.wouldRefuseCount))}</Badge>}
      {isWeighted && <Note>{t.weights(weights.map((weight) => weight / 1000).join(" / "))}</Note>}
      {each.overrideEndTime && (
        <Note>
          {t.overrideOf(limitValue(each.dimension, each.baseLimitValue))}{" "}
          <Time of={each.overrideEndTime} />: {each.overrideReason}
        </Note>
      )}
    </div>
  );
}
