// Organizations and their projects: create, rename, bind, suspend, resume and close.

import type {
  OrganizationJson,
  ProjectJson,
  SuspensionJson,
} from "../gen/weir/v1/admin_service_pb.js";
import type {
  ClosureEffectsJson,
  ClosureJson,
  RemainingCreditJson,
} from "../gen/weir/v1/closures_pb.js";
import { file } from "../client.js";
import { count, decimal, money, scaled } from "../format.js";
import { billedTo } from "./month.js";
import { Action, Unusable, digits, listed } from "../parts/actions.js";
import type { Asked } from "../parts/actions.js";
import { Badge, Command, Download, Name, Note, Pages, Search, Time } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, tried, useLoaded, useView } from "../view.js";
import type { Caller, Page } from "../view.js";

const LIST = "AdminService/ListOrganizations";
const PAGE_SIZE = 100;
const t = text.tenants;
const PROFILE = t.profile; // labels, by the names of the fields
const WEIGHT_DIGITS = 3;

export const tenants: Page = {
  id: "organizations",
  title: text.pages.tenants,
  calls: [LIST],
  Show: Tenants,
};

function Tenants() {
  const view = useView();
  const found = useLoaded(async (caller) => {
    const asked = view.asked("org") || view.session.organizationId;
    const chosen = await tried(caller(LIST, { organization: asked }));
    const listed = await caller(LIST, {
      search: view.asked("search"),
      pageSize: PAGE_SIZE,
      pageToken: view.asked("page"),
    });
    return { shown: "value" in chosen ? chosen.value.organizations?.[0] : undefined, ...listed };
  });
  return (
    <Show of={found}>
      {({ shown, organizations = [], nextPageToken }) => {
        return (
          <>
            <div className="controls">
              <Action
                call="AdminService/CreateOrganization"
                label={t.create}
                title={t.create}
                act={t.createAct}
                isPrimary
                fields={[
                  {
                    name: "name",
                    label: t.name,
                    help: t.nameHelp,
                    isRequired: true,
                  },
                  {
                    name: "currency_code",
                    label: t.currency,
                    help: t.currencyHelp,
                    placeholder: "USD",
                  },
                ]}
                request={({ name = "", currency_code: currencyCode = "" }, requestId) => ({
                  name,
                  currencyCode: currencyCode.toUpperCase(),
                  requestId,
                })}
                done={({ organization }) => t.created(organization?.name ?? "")}
                changed={found.reload}
              />
            </div>
            {(nextPageToken || view.asked("page") || view.asked("search")) && (
              <Search terms={[{ name: "search", label: t.search }]} />
            )}
            <Table
              caption={t.caption}
              columns={[
                column<OrganizationJson>(text.organization, (each) => (
                  <a href={addressOf("organizations", { org: each.name })}>
                    <Name of={each.name} />
                  </a>
                )),
                column<OrganizationJson>(t.currency, (each) => each.currencyCode),
                column<OrganizationJson>(t.since, (each) => <Time of={each.createTime} />),
                column<OrganizationJson>(t.region, (each) => each.region),
                column<OrganizationJson>(text.state, (each) => <State of={each} />),
                column<OrganizationJson>(text.change, (each) => (
                  <OrganizationChanges of={each} reload={found.reload} />
                )),
              ]}
              rows={organizations}
              keyOf={(each) => each.organizationId}
            />
            <Pages next={nextPageToken} />
            {shown && <Administration key={shown.name} of={shown} reload={found.reload} />}
            {shown && view.may("AdminService/ListProjects") && (
              <Projects key={shown.organizationId} of={shown} />
            )}
            <Command>weir org list</Command>
          </>
        );
      }}
    </Show>
  );
}

function State({
  of: { suspension, closure },
}: {
  of: { suspension?: SuspensionJson; closure?: ClosureJson };
}) {
  if (closure)
    return (
      <>
        <Badge>{t.isClosed}</Badge>
        <Note>
          <Time of={closure.closeTime} />: {closure.reason}
        </Note>
      </>
    );
  if (!suspension) return <Badge kind="good">{t.active}</Badge>;
  return (
    <>
      <Badge kind="bad">{t.suspended}</Badge>
      <Note>
        <Time of={suspension.createTime} />: {suspension.reason}
      </Note>
    </>
  );
}

// Billing profile, weight in the fair queue, and everything that the organization has, as a file.
function Administration({
  of: { organizationId: organization = "", name = "", billingProfile = {}, queueWeightMilli },
  reload,
}: {
  of: OrganizationJson;
  reload: () => void;
}) {
  const view = useView();
  const kept = billingProfile;
  const line = (field: keyof typeof PROFILE, initial = ""): Asked => ({
    name: field,
    label: PROFILE[field],
    initial,
  });
  return (
    <>
      <h2>{t.administrationOf(name)}</h2>
      <Note>{text.bill.billedTo(billedTo({ organizationName: name, billingProfile }))}</Note>
      <div className="buttons">
        <Action
          call="AdminService/SetBillingProfile"
          label={t.billingProfile}
          title={t.billingTitle(name)}
          explanation={t.billingExplanation}
          act={text.save}
          fields={[
            line("legal_name", kept.legalName),
            line("address_line1", kept.addressLine1),
            line("address_line2", kept.addressLine2),
            line("postal_code", kept.postalCode),
            line("city", kept.city),
            line("state", kept.state),
            line("country", kept.country),
            line("tax_id", kept.taxId),
            line("emails", kept.emails?.join(", ")),
            line("language", kept.language),
          ]}
          request={(values) => ({
            organization,
            billingProfile: {
              legalName: values["legal_name"] ?? "",
              addressLine1: values["address_line1"] ?? "",
              addressLine2: values["address_line2"] ?? "",
              postalCode: values["postal_code"] ?? "",
              city: values["city"] ?? "",
              state: values["state"] ?? "",
              country: (values["country"] ?? "").toUpperCase(),
              taxId: values["tax_id"] ?? "",
              emails: listed(values["emails"]),
              language: values["language"] ?? "",
            },
          })}
          done={() => t.billingIsSet(name)}
          changed={reload}
        />
        <Action
          call="AdminService/SetQueueWeight"
          label={t.weight}
          title={t.weightTitle(name)}
          explanation={t.weightExplanation}
          act={text.save}
          fields={[
            {
              name: "queue_weight_milli",
              label: t.weight,
              help: t.weightHelp,
              initial: decimal(queueWeightMilli, WEIGHT_DIGITS, 0),
              isRequired: true,
            },
          ]}
          request={(values) => {
            const milli = scaled(digits(values["queue_weight_milli"]), WEIGHT_DIGITS);
            if (milli === null) throw new Unusable("queue_weight_milli", t.weightHelp);
            return { organization, queueWeightMilli: milli };
          }}
          done={() => t.weightIsSet(name)}
          changed={reload}
        />
        {view.may("BillingService/ExportOrganization") && (
          <Download fetched={() => file("BillingService/ExportOrganization", { organization })}>
            {t.exportAll}
          </Download>
        )}
      </div>
    </>
  );
}

function OrganizationChanges({
  of: { organizationId: organization = "", name = "", suspension, closure, region = "" },
  reload,
}: {
  of: OrganizationJson;
  reload: () => void;
}) {
  if (closure) return null;
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/UpdateOrganization"
        label={t.rename}
        about={name}
        title={t.renameTitle(name)}
        act={t.rename}
        fields={[{ name: "name", label: t.name, initial: name, isRequired: true }]}
        request={(values) => ({ organization, name: values["name"] ?? "" })}
        done={(answer) => t.renamed(answer.organization?.name ?? "")}
        changed={reload}
      />
      <Action
        call="AdminService/BindOrganization"
        label={t.bind}
        about={name}
        title={t.bindTitle(name)}
        explanation={t.bindExplanation}
        act={text.save}
        fields={[{ name: "region", label: t.region, help: t.regionHelp, initial: region }]}
        request={(values) => ({ organization, region: (values["region"] ?? "").trim() })}
        done={(answer) => t.isBound(name, answer.organization?.region ?? "")}
        changed={reload}
      />
      {suspension ? (
        <Action
          call="AdminService/ResumeOrganization"
          label={t.resume}
          about={name}
          title={t.resumeTitle(name)}
          act={t.resume}
          request={() => ({ organization })}
          done={() => t.resumed(name)}
          changed={reload}
        />
      ) : (
        <Action
          call="AdminService/SuspendOrganization"
          label={t.suspend}
          about={name}
          title={t.suspendTitle(name)}
          explanation={t.suspendExplanation}
          act={t.suspend}
          isDanger
          fields={[{ name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true }]}
          request={({ reason = "" }) => ({ organization, reason })}
          done={() => t.isSuspended(name)}
          changed={reload}
        />
      )}
      <Action
        call="AdminService/CloseOrganization"
        label={t.close}
        about={name}
        title={t.closeTitle(name)}
        explanation={
          <Effects
            of={organization}
            load={async (caller) =>
              (await caller("AdminService/CloseOrganization", { organization, validateOnly: true }))
                .effects
            }
          />
        }
        act={t.close}
        isDanger
        fields={[...closing(name), { name: "remaining_credit", label: t.credit, options: CREDIT }]}
        request={(values) => ({
          organization,
          confirmName: values["confirm_name"] ?? "",
          reason: values["reason"] ?? "",
          remainingCredit: values["remaining_credit"] as RemainingCreditJson,
        })}
        done={() => t.closed(name)}
        changed={reload}
      />
    </div>
  );
}

const CREDIT: [RemainingCreditJson, string][] = [
  ["REMAINING_CREDIT_UNSPECIFIED", t.noCredit],
  ["REMAINING_CREDIT_REFUND", t.refundCredit],
  ["REMAINING_CREDIT_EXPIRE", t.expireCredit],
  ["REMAINING_CREDIT_KEEP", t.keepCredit],
];

function closing(name: string): Asked[] {
  return [
    { name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true },
    { name: "confirm_name", label: t.confirm(name), isRequired: true },
  ];
}

// What a closing would change, before it is confirmed.
function Effects({
  of,
  load,
}: {
  of: string;
  load: (caller: Caller) => Promise<ClosureEffectsJson | undefined>;
}) {
  const found = useLoaded(load, [of]);
  return (
    <>
      <p>{t.closeExplanation}</p>
      <Show of={found}>
        {(effects) => (
          <ul className="effects">
            {effectsOf(effects).map((each) => (
              <li key={each}>{each}</li>
            ))}
          </ul>
        )}
      </Show>
    </>
  );
}

export function effectsOf(effects: ClosureEffectsJson = {}): string[] {
  const { openMonths = [], unbilled, remainingCredit } = effects;
  return [
    t.endsRequests(count(effects.runningRequestCount ?? 0)),
    t.revokesKeys(count(effects.activeKeyCount ?? 0)),
    ...(effects.openProjectCount ? [t.closesProjects(count(effects.openProjectCount))] : []),
    ...(effects.openRentalCount ? [t.endsRentals(count(effects.openRentalCount))] : []),
    ...(openMonths.length > 0 ? [t.monthsOpen(openMonths.join(", "))] : []),
    ...(unbilled?.currencyCode ? [t.unbilled(money(unbilled))] : []),
    ...(remainingCredit?.currencyCode ? [t.creditLeft(money(remainingCredit))] : []),
  ];
}

function Projects({
  of: { organizationId: organization = "", name = "" },
}: {
  of: OrganizationJson;
}) {
  const view = useView();
  const found = useLoaded(
    (caller) =>
      caller("AdminService/ListProjects", {
        organization,
        pageSize: PAGE_SIZE,
        pageToken: view.asked("projects"),
      }),
    [organization],
  );
  return (
    <>
      <h2>{t.projectsOf(name)}</h2>
      <Show of={found}>
        {({ projects, nextPageToken }) => (
          <>
            <Table
              caption={t.projectsOf(name)}
              columns={[
                column<ProjectJson>(text.project, (each) => <Name of={each.name} />),
                column<ProjectJson>(t.since, (each) => <Time of={each.createTime} />),
                column<ProjectJson>(text.state, (each) => <State of={each} />),
                column<ProjectJson>(text.change, (each) => (
                  <ProjectChanges of={each} reload={found.reload} />
                )),
              ]}
              rows={projects}
              empty={t.noProjects}
              keyOf={(each) => each.projectId}
            />
            <Pages next={nextPageToken} parameter="projects" />
            <div className="buttons">
              <Action
                call="AdminService/CreateProject"
                label={t.createProject}
                title={t.createProjectIn(name)}
                act={t.createAct}
                isPrimary
                fields={[
                  {
                    name: "name",
                    label: t.name,
                    help: t.nameHelp,
                    isRequired: true,
                  },
                ]}
                request={(values, requestId) => ({
                  organization,
                  name: values["name"] ?? "",
                  requestId,
                })}
                done={({ project }) => t.created(project?.name ?? "")}
                changed={found.reload}
              />
            </div>
          </>
        )}
      </Show>
    </>
  );
}

function ProjectChanges({
  of: { projectId: project = "", name = "", suspension, closure },
  reload,
}: {
  of: ProjectJson;
  reload: () => void;
}) {
  if (closure) return null;
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/UpdateProject"
        label={t.rename}
        about={name}
        title={t.renameTitle(name)}
        act={t.rename}
        fields={[{ name: "name", label: t.name, initial: name, isRequired: true }]}
        request={(values) => ({ project, name: values["name"] ?? "" })}
        done={(answer) => t.renamed(answer.project?.name ?? "")}
        changed={reload}
      />
      {suspension ? (
        <Action
          call="AdminService/ResumeProject"
          label={t.resume}
          about={name}
          title={t.resumeTitle(name)}
          act={t.resume}
          request={() => ({ project })}
          done={() => t.resumed(name)}
          changed={reload}
        />
      ) : (
        <Action
          call="AdminService/SuspendProject"
          label={t.suspend}
          about={name}
          title={t.suspendTitle(name)}
          explanation={t.suspendExplanation}
          act={t.suspend}
          isDanger
          fields={[{ name: "reason", label: t.reason, help: t.reasonHelp, isRequired: true }]}
          request={({ reason = "" }) => ({ project, reason })}
          done={() => t.isSuspended(name)}
          changed={reload}
        />
      )}
      <Action
        call="AdminService/CloseProject"
        label={t.close}
        about={name}
        title={t.closeTitle(name)}
        explanation={
          <Effects
            of={project}
            load={async (caller) =>
              (await caller("AdminService/CloseProject", { project, validateOnly: true })).effects
            }
          />
        }
        act={t.close}
        isDanger
        fields={closing(name)}
        request={(values) => ({
          project,
          confirmName: values["confirm_name"] ?? "",
          reason: values["reason"] ?? "",
        })}
        done={() => t.closed(name)}
        changed={reload}
      />
    </div>
  );
}
