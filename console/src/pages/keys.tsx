// API keys of an organization: create, restrict, rotate and revoke.

import type {
  ApiKeyJson,
  ApiKeyStateJson,
  UpdateApiKeyRequestJson,
} from "../gen/weir/v1/admin_service_pb.js";
import { count } from "../format.js";
import { Action, digits, listed, timeOf } from "../parts/actions.js";
import type { Asked, Values } from "../parts/actions.js";
import { Badge, Choice, Command, Name, Note, Pages, Search, Time } from "../parts/basics.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import type { Chosen } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import type { Column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, useLoaded, useView } from "../view.js";
import type { Page, View } from "../view.js";

const LIST = "AdminService/ListApiKeys";
const DAY_S = 86_400;
const HOUR_S = 3600;
const PAGE_SIZE = 100;
const STATES: Record<string, ApiKeyStateJson> = {
  "": "API_KEY_STATE_VALID",
  ended: "API_KEY_STATE_ENDED",
  all: "API_KEY_STATE_UNSPECIFIED",
};
const t = text.keys;

export const keys: Page = { id: "keys", title: text.pages.keys, calls: [LIST], Show: Keys };

function Keys() {
  const view = useView();
  const state = view.asked("state");
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const { projects = [] } = view.may("AdminService/ListProjects")
      ? await caller("AdminService/ListProjects", { organization: chosen.ref })
      : {};
    const listed = await caller(LIST, {
      organization: chosen.ref,
      search: view.asked("search"),
      state: STATES[state] ?? STATES[""],
      pageSize: PAGE_SIZE,
      pageToken: view.asked("page"),
    });
    return { chosen, projects: projects.map((each) => each.name ?? ""), ...listed };
  });
  return (
    <Show of={found}>
      {({ chosen, projects, apiKeys, nextPageToken }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <Choice
              name={text.state}
              options={[
                ["", t.valid],
                ["ended", t.ended],
                ["all", t.all],
              ]}
              value={state}
              onChange={(next) => view.go({ state: next, page: "" })}
            />
            <Create chosen={chosen} projects={projects} reload={found.reload} />
          </div>
          <Search terms={[{ name: "search", label: t.search }]} />
          <Table
            caption={t.caption}
            columns={columns(view, found.reload)}
            rows={apiKeys}
            empty={view.asked("search") || state ? t.noMatch : t.none}
            keyOf={(each) => each.apiKeyId}
          />
          <Pages next={nextPageToken} />
          <Note>{t.note}</Note>
          <Command>{`weir key list --org ${chosen.name || "ORG"}`}</Command>
        </>
      )}
    </Show>
  );
}

function isEnded(key: ApiKeyJson): boolean {
  return (
    Boolean(key.revokeTime) ||
    (key.expireTime !== undefined && Date.parse(key.expireTime) <= Date.now())
  );
}

function columns(view: View, reload: () => void): Column<ApiKeyJson>[] {
  const mayChange = (["RotateApiKey", "UpdateApiKey", "RevokeApiKey"] as const).some((each) =>
    view.may(`AdminService/${each}`),
  );
  return [
    column(t.key, (each) => (
      <>
        <Name of={each.name} />
        <Note>
          <a
            className="id"
            href={addressOf("limits", { org: view.asked("org"), key: each.prefix })}
          >
            {each.prefix}
          </a>
        </Note>
      </>
    )),
    column(text.project, (each) => each.projectName),
    column(t.permissions, (each) => (
      <div className="badges">
        {each.role && <Badge>{t.role(each.role)}</Badge>}
        {each.scopes?.map((scope) => (
          <Badge key={scope}>{t.scope(scope)}</Badge>
        ))}
      </div>
    )),
    column(t.restrictions, (each) =>
      restrictionsOf(each).map((shown) => <Note key={shown}>{shown}</Note>),
    ),
    column(t.lastUse, (each) => (each.lastUseTime ? <Time of={each.lastUseTime} /> : t.neverUsed)),
    column(text.state, (each) => <State of={each} />),
    ...(mayChange
      ? [
          column<ApiKeyJson>(
            text.change,
            (each) => !isEnded(each) && <Changes of={each} reload={reload} />,
          ),
        ]
      : []),
  ];
}

function restrictionsOf({
  models = [],
  allowedNetworks = [],
  maxInputTokens,
  maxOutputTokens,
  group,
  strictParameters,
}: ApiKeyJson): string[] {
  return [
    models.length > 0 && t.onlyModels(models.join(", ")),
    allowedNetworks.length > 0 && t.onlyNetworks(allowedNetworks.join(", ")),
    maxInputTokens && t.maxInput(count(maxInputTokens)),
    maxOutputTokens && t.maxOutput(count(maxOutputTokens)),
    group && t.inGroup(group),
    strictParameters && t.strict,
  ].filter((each): each is string => Boolean(each));
}

function State({ of: key }: { of: ApiKeyJson }) {
  const { revokeTime, expireTime, overlapEndTime } = key;
  if (revokeTime) {
    return (
      <>
        <Badge kind="bad">{t.revoked}</Badge>
        <Note>
          <Time of={revokeTime} />
        </Note>
      </>
    );
  }
  return (
    <>
      <Badge kind={isEnded(key) ? "warning" : "good"}>{isEnded(key) ? t.expired : t.isValid}</Badge>
      {expireTime && (
        <Note>
          {isEnded(key) ? t.since : t.until} <Time of={expireTime} />
        </Note>
      )}
      {overlapEndTime && Date.parse(overlapEndTime) > Date.now() && (
        <Note>
          {t.oldUntil} <Time of={overlapEndTime} />
        </Note>
      )}
    </>
  );
}

// Fields of a key's restrictions, with its present ones.
function restrictions(key: ApiKeyJson = {}): Asked[] {
  return [
    {
      name: "models",
      label: t.models,
      help: t.modelsHelp,
      initial: (key.models ?? []).join(", "),
    },
    {
      name: "allowed_networks",
      label: t.networks,
      help: t.networksHelp,
      initial: (key.allowedNetworks ?? []).join(", "),
      placeholder: "203.0.113.0/24, 2001:db8::/32",
    },
    {
      name: "max_input_tokens",
      label: t.inputLimit,
      help: t.tokensHelp,
      type: "number",
      initial: key.maxInputTokens ?? "",
    },
    {
      name: "max_output_tokens",
      label: t.outputLimit,
      help: t.tokensHelp,
      type: "number",
      initial: key.maxOutputTokens ?? "",
    },
    { name: "group", label: t.group, help: t.groupHelp, initial: key.group ?? "" },
    {
      name: "strict_parameters",
      label: t.strictLabel,
      type: "check",
      initial: key.strictParameters ? "true" : "",
    },
  ];
}

function roles(view: View, initial?: string): Asked {
  const options = ["", "viewer", "developer", "finance", "admin", "owner"].map(
    (each): [string, string] => [each, each ? t.role(each) : t.noRole],
  );
  return {
    name: "role",
    label: t.roleLabel,
    help: view.session.isOperator ? t.roleHelp : t.roleHelpOwn,
    options,
    initial: initial ?? "",
  };
}

const scopes = (initial: string): Asked => ({
  name: "scopes",
  label: t.scopes,
  help: t.scopesHelp,
  initial,
  placeholder: "inference",
});

function Create({
  chosen,
  projects,
  reload,
}: {
  chosen: Chosen;
  projects: string[];
  reload: () => void;
}) {
  const view = useView();
  const project: Asked =
    projects.length > 0
      ? {
          name: "project",
          label: text.project,
          options: projects.map((each) => [each, each]),
        }
      : { name: "project", label: text.project, isRequired: true };
  return (
    <Action
      call="AdminService/CreateApiKey"
      label={t.create}
      title={t.createTitle}
      act={t.create}
      isPrimary
      fields={[
        { name: "name", label: t.name, help: t.nameHelp, isRequired: true },
        project,
        scopes("inference"),
        roles(view),
        { name: "lifetime", label: t.lifetime, help: t.lifetimeHelp, type: "number" },
        ...restrictions(),
      ]}
      request={(values, requestId) => ({
        organization: chosen.ref,
        project: values["project"] ?? "",
        name: values["name"] ?? "",
        scopes: listed(values["scopes"]),
        role: values["role"] ?? "",
        models: listed(values["models"]),
        allowedNetworks: listed(values["allowed_networks"]),
        maxInputTokens: digits(values["max_input_tokens"]) || "0",
        maxOutputTokens: digits(values["max_output_tokens"]) || "0",
        group: values["group"] ?? "",
        strictParameters: values["strict_parameters"] === "true",
        requestId,
        ...(values["lifetime"]
          ? { lifetime: `${Number(digits(values["lifetime"])) * DAY_S}s` }
          : {}),
      })}
      done={({ apiKey = {}, secret = "" }) => ({
        message: t.created(apiKey.name ?? "", apiKey.prefix ?? ""),
        secret,
      })}
      changed={reload}
    />
  );
}

function Changes({ of: key, reload }: { of: ApiKeyJson; reload: () => void }) {
  const view = useView();
  const { apiKeyId: apiKey = "", name = "", prefix = "" } = key;
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/UpdateApiKey"
        label={t.restrict}
        about={prefix}
        title={t.restrictTitle(name, prefix)}
        act={text.save}
        fields={[
          { name: "name", label: t.name, initial: name },
          scopes((key.scopes ?? []).join(", ")),
          roles(view, key.role),
          ...expiry(key),
          ...restrictions(key),
        ]}
        request={(values) => updateOf(key, values)}
        done={() => t.restricted(prefix)}
        changed={reload}
      />
      <Action
        call="AdminService/RotateApiKey"
        label={t.rotate}
        about={prefix}
        title={t.rotateTitle(name, prefix)}
        explanation={t.rotateExplanation}
        act={t.rotate}
        fields={[
          {
            name: "overlap",
            label: t.overlap,
            help: t.overlapHelp,
            type: "number",
            initial: "24",
          },
        ]}
        request={({ overlap = "" }, requestId) => ({
          apiKey,
          requestId,
          ...(overlap ? { overlap: `${Number(digits(overlap)) * HOUR_S}s` } : {}),
        })}
        done={({ secret = "" }) => ({ message: t.rotated(name, prefix), secret })}
        changed={reload}
      />
      <Action
        call="AdminService/RevokeApiKey"
        label={t.revoke}
        about={prefix}
        title={t.revokeTitle(name, prefix)}
        explanation={t.revokeExplanation}
        act={t.revoke}
        isDanger
        request={() => ({ apiKey })}
        done={() => t.isRevoked(prefix)}
        changed={reload}
      />
    </div>
  );
}

function expiry({ expireTime }: ApiKeyJson): Asked[] {
  const never: Asked[] = expireTime
    ? [{ name: "never_expires", label: t.neverExpires, type: "check" }]
    : [];
  return [
    { name: "expire_time", label: t.expiry, help: t.expiryHelp, type: "datetime-local" },
    ...never,
  ];
}

// The changed fields only: what is not sent stays as it is.
export function updateOf(key: ApiKeyJson, values: Values): UpdateApiKeyRequestJson {
  const { name = "", role = "", group = "" } = values;
  const [models, networks, chosen] = [
    listed(values["models"]),
    listed(values["allowed_networks"]),
    listed(values["scopes"]),
  ];
  const isSame = (one: string[], other: string[] = []) =>
    JSON.stringify(one) === JSON.stringify(other);
  const input = digits(values["max_input_tokens"]) || "0";
  const output = digits(values["max_output_tokens"]) || "0";
  const isStrict = values["strict_parameters"] === "true";
  return {
    apiKey: key.apiKeyId ?? "",
    ...(name === key.name ? {} : { name }),
    ...(isSame(chosen, key.scopes) ? {} : { scopes: chosen }),
    ...(role === (key.role ?? "") ? {} : { role }),
    ...(isSame(models, key.models) ? {} : models.length > 0 ? { models } : { allModels: true }),
    ...(isSame(networks, key.allowedNetworks)
      ? {}
      : networks.length > 0
        ? { allowedNetworks: networks }
        : { allNetworks: true }),
    ...(input === (key.maxInputTokens ?? "0") ? {} : { maxInputTokens: input }),
    ...(output === (key.maxOutputTokens ?? "0") ? {} : { maxOutputTokens: output }),
    ...(group === (key.group ?? "") ? {} : { group }),
    ...(isStrict === Boolean(key.strictParameters) ? {} : { strictParameters: isStrict }),
    ...(values["expire_time"] ? { expireTime: timeOf("expire_time", values["expire_time"]) } : {}),
    ...(values["never_expires"] === "true" ? { neverExpires: true } : {}),
  };
}
