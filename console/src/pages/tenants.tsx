// Organizations and their projects: create, rename, suspend and resume.

import type {
  OrganizationJson,
  ProjectJson,
  SuspensionJson,
} from "../gen/weir/v1/admin_service_pb.js";
import { Action } from "../parts/actions.js";
import { Badge, Command, Name, Note, Time } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const LIST = "AdminService/ListOrganizations";
const t = text.tenants;

export const tenants: Page = {
  id: "organizations",
  title: text.pages.tenants,
  calls: [LIST],
  Show: Tenants,
};

function Tenants() {
  const view = useView();
  const found = useLoaded((caller) => caller(LIST));
  return (
    <Show of={found}>
      {({ organizations = [] }) => {
        const asked = view.asked("org");
        const own = organizations.find(
          (each) => each.organizationId === view.session.organizationId,
        );
        const shown =
          organizations.find((each) => each.name === asked) ??
          (organizations.length === 1 ? organizations[0] : own);
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
                column<OrganizationJson>(text.state, (each) => <State of={each.suspension} />),
                column<OrganizationJson>(text.change, (each) => (
                  <OrganizationChanges of={each} reload={found.reload} />
                )),
              ]}
              rows={organizations}
              keyOf={(each) => each.organizationId}
            />
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

function State({ of: suspension }: { of: SuspensionJson | undefined }) {
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

function OrganizationChanges({
  of: { organizationId: organization = "", name = "", suspension },
  reload,
}: {
  of: OrganizationJson;
  reload: () => void;
}) {
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
    </div>
  );
}

function Projects({
  of: { organizationId: organization = "", name = "" },
}: {
  of: OrganizationJson;
}) {
  const found = useLoaded(
    (caller) => caller("AdminService/ListProjects", { organization }),
    [organization],
  );
  return (
    <>
      <h2>{t.projectsOf(name)}</h2>
      <Show of={found}>
        {({ projects }) => (
          <>
            <Table
              caption={t.projectsOf(name)}
              columns={[
                column<ProjectJson>(text.project, (each) => <Name of={each.name} />),
                column<ProjectJson>(t.since, (each) => <Time of={each.createTime} />),
                column<ProjectJson>(text.state, (each) => <State of={each.suspension} />),
                column<ProjectJson>(text.change, (each) => (
                  <ProjectChanges of={each} reload={found.reload} />
                )),
              ]}
              rows={projects}
              empty={t.noProjects}
              keyOf={(each) => each.projectId}
            />
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
  of: { projectId: project = "", name = "", suspension },
  reload,
}: {
  of: ProjectJson;
  reload: () => void;
}) {
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
    </div>
  );
}
