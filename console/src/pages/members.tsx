// Members of an organization, invitations, and service accounts.

import type {
  InvitationJson,
  InviteMemberRequestJson,
  ListInvitationsResponseJson,
  MemberJson,
  ServiceAccountJson,
} from "../gen/weir/v1/members_pb.js";
import { count } from "../format.js";
import { Action, Unusable, digits } from "../parts/actions.js";
import type { Asked, Secret, Values } from "../parts/actions.js";
import { Badge, Command, Id, Name, Note, Pages, Search, Time } from "../parts/basics.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded, useView } from "../view.js";
import type { Page, View } from "../view.js";

const LIST = "AdminService/ListMembers";
const DAY_S = 86_400;
const ROLES = ["viewer", "developer", "finance", "admin", "owner"];
const t = text.members;

export const members: Page = {
  id: "members",
  title: text.pages.members,
  calls: [LIST],
  Show: Members,
};

function Members() {
  const view = useView();
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const { projects = [] } = view.may("AdminService/ListProjects")
      ? await caller("AdminService/ListProjects", { organization: chosen.ref })
      : {};
    const invitations = view.may("AdminService/ListInvitations")
      ? await caller("AdminService/ListInvitations", {
          organization: chosen.ref,
          pageToken: view.asked("invitations"),
        })
      : null;
    const search = view.asked("search").toLowerCase();
    const asked = { organization: chosen.ref, search, pageToken: view.asked("page") };
    return {
      chosen,
      projects: projects.map((each) => each.name ?? ""),
      invitations,
      ...(await caller(LIST, asked)),
    };
  });
  return (
    <Show of={found}>
      {({ chosen, projects, invitations, members: shown, nextPageToken }) => (
        <>
          <div className="controls">
            <OrganizationChoice of={chosen} />
            <Invite organization={chosen.ref} projects={projects} reload={found.reload} />
          </div>
          <Search terms={[{ name: "search", label: t.search, placeholder: "ann@" }]} />
          <Table
            caption={t.caption}
            columns={[
              column<MemberJson>(t.person, (each) => <Person of={each} />),
              column<MemberJson>(t.role, (each) => each.role),
              column<MemberJson>(text.project, (each) => <Name of={each.projectName} />),
              column<MemberJson>(t.since, (each) => <Time of={each.createTime} />),
              column<MemberJson>(t.key, (each) => <Id of={each.keyPrefix} />),
              column<MemberJson>(text.change, (each) => (
                <Changes of={each} reload={found.reload} />
              )),
            ]}
            rows={shown}
            empty={view.asked("search") ? t.noMatch : t.none}
            keyOf={(each) => each.membershipId}
          />
          <Pages next={nextPageToken} />
          {invitations && <Invitations of={invitations} reload={found.reload} />}
          {view.may("AdminService/ListServiceAccounts") && (
            <ServiceAccounts organization={chosen.ref} />
          )}
          <Command>{`weir member list --org ${chosen.ref}`}</Command>
        </>
      )}
    </Show>
  );
}

function Person({ of: member }: { of: MemberJson }) {
  return (
    <>
      <Name of={member.displayName} />
      <Note>
        <Name of={member.email} />
      </Note>
      {member.deactivateTime && <Badge kind="bad">{t.deactivated}</Badge>}
    </>
  );
}

function role(view: View, initial: string, none = ""): Asked {
  const names = [
    ...(none ? [""] : []),
    ...ROLES,
    ...(view.session.isOperator && !none ? ["operator"] : []),
  ];
  return {
    name: "role",
    label: t.role,
    help: none ? t.accountRoleHelp : t.roleHelp,
    options: names.map((each) => [each, each || none]),
    initial,
  };
}

const lifetime: Asked = {
  name: "lifetime",
  label: t.lifetime,
  help: t.lifetimeHelp,
  type: "number",
  initial: "7",
};

function lifetimeOf({ lifetime: days = "" }: Values): Pick<InviteMemberRequestJson, "lifetime"> {
  if (!days.trim()) return {};
  if (!/^\d+$/.test(digits(days))) throw new Unusable("lifetime", t.notDays(days));
  return { lifetime: `${Number(digits(days)) * DAY_S}s` };
}

// The link with which the invited person accepts. A repeated call returns no token.
function linkOf(invitation: InvitationJson = {}, token = ""): Secret | string {
  const email = invitation.email ?? "";
  if (!token) return t.invitedBefore(email);
  const page = location.href.split("#")[0];
  return {
    title: t.linkTitle,
    message: t.invited(email),
    secret: `${page}#/sign-in?invitation=${token}`,
  };
}

interface Within {
  organization: string;
  reload: () => void;
}

function Invite({ organization, projects, reload }: Within & { projects: string[] }) {
  const view = useView();
  const project: Asked[] =
    projects.length > 1
      ? [
          {
            name: "project",
            label: text.project,
            help: t.projectHelp,
            options: projects.map((each) => [each, each]),
          },
        ]
      : [];
  return (
    <Action
      call="AdminService/InviteMember"
      label={t.invite}
      title={t.inviteTitle}
      explanation={t.inviteExplanation}
      act={t.invite}
      isPrimary
      fields={[
        { name: "email", label: t.email, isRequired: true, placeholder: "ann@example.com" },
        role(view, "viewer"),
        ...project,
        lifetime,
      ]}
      request={(values, requestId) => ({
        organization,
        email: (values["email"] ?? "").trim(),
        role: values["role"] ?? "",
        project: values["project"] ?? "",
        requestId,
        ...lifetimeOf(values),
      })}
      done={({ invitation, token }) => linkOf(invitation, token)}
      changed={reload}
    />
  );
}

function Changes({ of: member, reload }: { of: MemberJson; reload: () => void }) {
  const view = useView();
  const { organizationId: organization = "", personId = "", email = "" } = member;
  return (
    <div className="buttons tight">
      {member.role !== "operator" && (
        <Action
          call="AdminService/UpdateMember"
          label={t.changeRole}
          about={email}
          title={t.roleTitle(email)}
          explanation={t.roleExplanation}
          act={text.save}
          fields={[
            { ...role(view, member.role ?? ""), options: ROLES.map((each) => [each, each]) },
          ]}
          request={(values) => ({ organization, member: personId, role: values["role"] ?? "" })}
          done={({ member: changed }) => t.roleIs(email, changed?.role ?? "")}
          changed={reload}
        />
      )}
      <Action
        call="AdminService/RemoveMember"
        label={t.remove}
        about={email}
        title={t.removeTitle(email)}
        explanation={t.removeExplanation}
        act={t.remove}
        isDanger
        fields={[
          {
            name: "revoke_keys",
            label: t.createdKeys,
            help: t.createdKeysHelp,
            options: [
              ["", t.askKeys],
              ["keep", t.keepKeys],
              ["revoke", t.revokeKeys],
            ],
          },
        ]}
        request={({ revoke_keys: keys }) => ({
          organization,
          member: personId,
          ...(keys ? { revokeKeys: keys === "revoke" } : {}),
        })}
        done={({ revokedKeys = [], keptKeys = [] }) =>
          t.removed(email, revokedKeys.join(", "), keptKeys.join(", "))
        }
        changed={reload}
      />
    </div>
  );
}

function Invitations({ of, reload }: { of: ListInvitationsResponseJson; reload: () => void }) {
  return (
    <>
      <h2>{t.invitations}</h2>
      <Table
        caption={t.invitations}
        columns={[
          column<InvitationJson>(t.email, (each) => <Name of={each.email} />),
          column<InvitationJson>(t.role, (each) => each.role),
          column<InvitationJson>(text.project, (each) => <Name of={each.projectName} />),
          column<InvitationJson>(t.invitedOn, (each) => <Time of={each.createTime} />),
          column<InvitationJson>(t.until, (each) => <End of={each} />),
          column<InvitationJson>(text.change, (each) => (
            <InvitationChanges of={each} reload={reload} />
          )),
        ]}
        rows={of.invitations}
        empty={t.noInvitations}
        keyOf={(each) => each.invitationId}
      />
      <Pages next={of.nextPageToken} parameter="invitations" />
    </>
  );
}

function End({ of: { expireTime = "" } }: { of: InvitationJson }) {
  return (
    <>
      <Time of={expireTime} />{" "}
      {Date.parse(expireTime) <= Date.now() && <Badge kind="warning">{t.expired}</Badge>}
    </>
  );
}

function InvitationChanges({ of, reload }: { of: InvitationJson; reload: () => void }) {
  const { invitationId = "", email = "" } = of;
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/ResendInvitation"
        label={t.resend}
        about={email}
        title={t.resendTitle(email)}
        explanation={t.resendExplanation}
        act={t.resend}
        fields={[lifetime]}
        request={(values) => ({ invitationId, ...lifetimeOf(values) })}
        done={({ invitation, token }) => linkOf(invitation, token)}
        changed={reload}
      />
      <Action
        call="AdminService/RevokeInvitation"
        label={t.revoke}
        about={email}
        title={t.revokeTitle(email)}
        act={t.revoke}
        isDanger
        request={() => ({ invitationId })}
        done={() => t.revoked(email)}
        changed={reload}
      />
    </div>
  );
}

function ServiceAccounts({ organization }: { organization: string }) {
  const view = useView();
  const found = useLoaded(
    (caller) =>
      caller("AdminService/ListServiceAccounts", {
        organization,
        pageToken: view.asked("accounts"),
      }),
    [organization],
  );
  return (
    <>
      <h2>{t.accounts}</h2>
      <Show of={found}>
        {({ serviceAccounts, nextPageToken }) => (
          <>
            <Table
              caption={t.accounts}
              columns={[
                column<ServiceAccountJson>(t.name, (each) => <Name of={each.name} />),
                column<ServiceAccountJson>(t.role, (each) => each.role || t.forModels),
                column<ServiceAccountJson>(t.keys, (each) => count(each.keyCount ?? 0), true),
                column<ServiceAccountJson>(t.since, (each) => <Time of={each.createTime} />),
                column<ServiceAccountJson>(text.change, (each) => (
                  <AccountChanges of={each} reload={found.reload} />
                )),
              ]}
              rows={serviceAccounts}
              empty={t.noAccounts}
              keyOf={(each) => each.serviceAccountId}
            />
            <Pages next={nextPageToken} parameter="accounts" />
            <div className="buttons">
              <Action
                call="AdminService/CreateServiceAccount"
                label={t.createAccount}
                title={t.createAccount}
                explanation={t.accountExplanation}
                act={t.create}
                isPrimary
                fields={[
                  { name: "name", label: t.name, help: t.nameHelp, isRequired: true },
                  role(view, "", t.forModels),
                ]}
                request={(values, requestId) => ({
                  organization,
                  name: values["name"] ?? "",
                  role: values["role"] ?? "",
                  requestId,
                })}
                done={({ serviceAccount }) => t.accountCreated(serviceAccount?.name ?? "")}
                changed={found.reload}
              />
            </div>
          </>
        )}
      </Show>
    </>
  );
}

function AccountChanges({ of, reload }: { of: ServiceAccountJson; reload: () => void }) {
  const view = useView();
  const {
    organizationId: organization = "",
    serviceAccountId: serviceAccount = "",
    name = "",
  } = of;
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/UpdateServiceAccount"
        label={t.changeRole}
        about={name}
        title={t.roleTitle(name)}
        explanation={t.accountRoleExplanation}
        act={text.save}
        fields={[role(view, of.role ?? "", t.forModels)]}
        request={(values) => ({ organization, serviceAccount, role: values["role"] ?? "" })}
        done={(answer) => t.roleIs(name, answer.serviceAccount?.role || t.forModels)}
        changed={reload}
      />
      <Action
        call="AdminService/DeleteServiceAccount"
        label={t.delete}
        about={name}
        title={t.deleteTitle(name)}
        explanation={t.deleteExplanation(count(of.keyCount ?? 0))}
        act={t.delete}
        isDanger
        request={() => ({ organization, serviceAccount })}
        done={() => t.deleted(name)}
        changed={reload}
      />
    </div>
  );
}
