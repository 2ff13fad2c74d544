"""RPCs for members, invitations, provisioned groups, service accounts and persons.

A caller gives, changes and takes away only permissions that it has: an administrator makes no owner
and removes none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import members_pb2 as pb

from api.access.auth import bearer_token
from api.access.permissions import check_may_give, check_permissions
from api.access.servicer import (
    AuthenticatedServicer,
    CallerTransaction,
    listing,
    once,
    removed,
)
from api.core import wire
from api.core.errors import PermissionDenied
from api.core.interceptor import Context
from metering.core.errors import InvalidValue
from metering.core.models import Person
from metering.tenants import invitations, members, provisioning, service_accounts
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.api_keys import KeyOwner, KeyRecord
from metering.tenants.authentication import Principal
from metering.tenants.invitations import InvitationRecord
from metering.tenants.key_groups import lock_groups
from metering.tenants.key_terms import KeyTerms
from metering.tenants.members import MemberRecord
from metering.tenants.person_erasure import erase_person
from metering.tenants.provisioning import GroupRoleRecord
from metering.tenants.service_accounts import ServiceAccountRecord
from metering.tenants.sign_in import create_link, link_url
from metering.tenants.tenants import find_organization

# Scopes that a key of a person or service account may have beside its role, which has the rest.
SCOPES_OF_OWNED = frozenset({"inference"})


class InvitationCalls(AuthenticatedServicer):
    """RPCs for invitations."""

    @once
    async def InviteMember(
        self, request: pb.InviteMemberRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.InviteMemberResponse]:
        session, token = acting.session, ""
        if earlier:
            invitation = await invitations.find_invitation(session, earlier)
        else:
            check_may_give(acting.principal, members.terms_of(request.role), None)
            invitation, token = await invitations.invite(
                session,
                organization=request.organization,
                email=request.email,
                role=request.role,
                project=request.project,
                lifetime=wire.given_duration(request, "lifetime"),
                actor=acting.actor,
            )
        return invitation.invitation_id, pb.InviteMemberResponse(
            invitation=invitation_message(invitation), token=token
        )

    async def ResendInvitation(
        self, request: pb.ResendInvitationRequest, context: Context
    ) -> pb.ResendInvitationResponse:
        async with self._acting(context) as acting:
            await self._check_invitation(acting, request.invitation_id)
            invitation, token = await invitations.resend_invitation(
                acting.session,
                invitation=request.invitation_id,
                lifetime=wire.given_duration(request, "lifetime"),
                actor=acting.actor,
            )
            return pb.ResendInvitationResponse(
                invitation=invitation_message(invitation), token=token
            )

    async def RevokeInvitation(
        self, request: pb.RevokeInvitationRequest, context: Context
    ) -> pb.RevokeInvitationResponse:
        async with self._acting(context) as acting:

            async def revoke() -> None:
                await self._check_invitation(acting, request.invitation_id)
                await invitations.revoke_invitation(
                    acting.session, invitation=request.invitation_id, actor=acting.actor
                )

            return pb.RevokeInvitationResponse(
                revoked=await removed(revoke(), allow_missing=request.allow_missing)
            )

    async def AcceptInvitation(
        self, request: pb.AcceptInvitationRequest, context: Context
    ) -> pb.AcceptInvitationResponse:
        """Authenticate the call by the token of the invitation, with the throttle of secrets."""
        token = bearer_token(context)
        if not token.startswith(invitations.TOKEN_PREFIX):
            await self._caller(context)  # no key has the permission
            raise PermissionDenied(
                "This call needs the token of an invitation. Send it as the bearer token."
            )
        origin = self._authenticator.origin_of(context)
        async with (
            self._authenticator.throttle.attempt(origin.peer, lambda: False),
            self._sessions.begin() as session,
        ):
            await take_changes_lock(session, alone=False)
            accepted = await invitations.accept_invitation(
                session,
                token=token,
                display_name=request.display_name,
                create_key=request.create_key,
                address=origin.address,
            )
        return pb.AcceptInvitationResponse(
            member=member_message(accepted.member), secret=accepted.secret
        )

    async def _check_invitation(self, acting: CallerTransaction, ref: str) -> None:
        found = await invitations.find_invitation(acting.session, ref)
        check_permissions(acting.principal, members.terms_of(found.role))


class MemberCalls(AuthenticatedServicer):
    """RPCs for members."""

    async def UpdateMember(
        self, request: pb.UpdateMemberRequest, context: Context
    ) -> pb.UpdateMemberResponse:
        async with self._acting(context) as acting:
            await self._changeable(acting, request.organization, request.member)
            check_may_give(acting.principal, members.terms_of(request.role), None)
            member = await members.change_role(
                acting.session,
                organization=request.organization,
                member=request.member,
                role=request.role,
                actor=acting.actor,
            )
            return pb.UpdateMemberResponse(member=member_message(member))

    async def RemoveMember(
        self, request: pb.RemoveMemberRequest, context: Context
    ) -> pb.RemoveMemberResponse:
        async with self._acting(context) as acting:
            member = await self._changeable(acting, request.organization, request.member)
            revoke_keys = wire.given(request, "revoke_keys")
            if revoke_keys:
                for key in await members.keys_created_by(acting.session, member):
                    check_permissions(acting.principal, key)
            removal = await members.remove_member(
                acting.session,
                organization=request.organization,
                member=request.member,
                revoke_keys=revoke_keys,
                actor=acting.actor,
            )
            return pb.RemoveMemberResponse(
                revoked_keys=[each.prefix for each in removal.revoked],
                kept_keys=[each.prefix for each in removal.kept],
            )

    async def _changeable(
        self, acting: CallerTransaction, organization: str, ref: str
    ) -> MemberRecord:
        """Look up a member that the caller may change, after locking the organization."""
        owner = await find_organization(acting.session, organization)
        await lock_groups(acting.session, owner.id)
        found = await members.find_member(acting.session, str(owner.id), ref)
        check_permissions(acting.principal, members.terms_of(found.role))
        return found


class ServiceAccountCalls(AuthenticatedServicer):
    """RPCs for service accounts."""

    @once
    async def CreateServiceAccount(
        self, request: pb.CreateServiceAccountRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.CreateServiceAccountResponse]:
        if earlier:
            account = await service_accounts.find_service_account(
                acting.session, request.organization, earlier
            )
        else:
            check_may_give(acting.principal, service_accounts.terms_of_account(request.role), None)
            account = await service_accounts.create_service_account(
                acting.session,
                organization=request.organization,
                name=request.name,
                role=request.role,
                actor=acting.actor,
            )
        return account.service_account_id, pb.CreateServiceAccountResponse(
            service_account=service_account_message(account)
        )

    async def UpdateServiceAccount(
        self, request: pb.UpdateServiceAccountRequest, context: Context
    ) -> pb.UpdateServiceAccountResponse:
        async with self._acting(context) as acting:
            await self._check_account(acting, request.organization, request.service_account)
            check_may_give(acting.principal, service_accounts.terms_of_account(request.role), None)
            account = await service_accounts.change_service_account(
                acting.session,
                organization=request.organization,
                service_account=request.service_account,
                role=request.role,
                actor=acting.actor,
            )
            return pb.UpdateServiceAccountResponse(service_account=service_account_message(account))

    async def DeleteServiceAccount(
        self, request: pb.DeleteServiceAccountRequest, context: Context
    ) -> pb.DeleteServiceAccountResponse:
        async with self._acting(context) as acting:

            async def delete() -> None:
                await self._check_account(acting, request.organization, request.service_account)
                await service_accounts.delete_service_account(
                    acting.session,
                    organization=request.organization,
                    service_account=request.service_account,
                    actor=acting.actor,
                )

            return pb.DeleteServiceAccountResponse(
                deleted=await removed(delete(), allow_missing=request.allow_missing)
            )

    async def _check_account(self, acting: CallerTransaction, organization: str, ref: str) -> None:
        owner = await find_organization(acting.session, organization)
        await lock_groups(acting.session, owner.id)
        found = await service_accounts.find_service_account(acting.session, str(owner.id), ref)
        check_permissions(acting.principal, service_accounts.terms_of_account(found.role))


class ProvisioningCalls(AuthenticatedServicer):
    """RPCs for groups of an organization's identity provider, which SCIM provisions."""

    async def SetGroupRole(
        self, request: pb.SetGroupRoleRequest, context: Context
    ) -> pb.SetGroupRoleResponse:
        async with self._acting(context) as acting:
            group = await provisioning.set_group_role(
                acting.session,
                organization=request.organization,
                group=request.group,
                role=request.role,
                project=request.project,
                actor=acting.actor,
            )
            return pb.SetGroupRoleResponse(group=group_message(group))


class PersonCalls(AuthenticatedServicer):
    """RPCs for persons, for the operator."""

    _console_url: Callable[[], str]

    async def UpdatePerson(
        self, request: pb.UpdatePersonRequest, context: Context
    ) -> pb.UpdatePersonResponse:
        async with self._transaction(context) as (session, actor):
            person = await members.rename_person(
                session, person=request.person, display_name=request.display_name, actor=actor
            )
            return pb.UpdatePersonResponse(person=person_message(person))

    async def DeactivatePerson(
        self, request: pb.DeactivatePersonRequest, context: Context
    ) -> pb.DeactivatePersonResponse:
        async with self._transaction(context) as (session, actor):
            person = await members.deactivate_person(session, person=request.person, actor=actor)
            return pb.DeactivatePersonResponse(person=person_message(person))

    async def ReactivatePerson(
        self, request: pb.ReactivatePersonRequest, context: Context
    ) -> pb.ReactivatePersonResponse:
        async with self._transaction(context) as (session, actor):
            person = await members.reactivate_person(session, person=request.person, actor=actor)
            return pb.ReactivatePersonResponse(person=person_message(person))

    async def ErasePerson(
        self, request: pb.ErasePersonRequest, context: Context
    ) -> pb.ErasePersonResponse:
        async with self._acting(context, alone=True) as acting:
            # A dry run does the same, and undoes it: so it finds every reason against it
            attempt = await acting.session.begin_nested()
            erased = await erase_person(acting.session, person=request.person, actor=acting.actor)
            await (attempt.rollback() if request.dry_run else attempt.commit())
            return wire.message_of(pb.ErasePersonResponse, erased)

    async def CreateSignInLink(
        self, request: pb.CreateSignInLinkRequest, context: Context
    ) -> pb.CreateSignInLinkResponse:
        if not (console := self._console_url()):
            raise InvalidValue(
                "person", "cannot sign in: this server has no console (WEIR_CONSOLE)"
            )
        lifetime = wire.given_duration(request, "lifetime")
        async with self._transaction(context) as (session, actor):
            person = await members.find_person(session, request.person)
            secret = await create_link(session, person, lifetime=lifetime, actor=actor)
        return pb.CreateSignInLinkResponse(url=link_url(console, secret))


async def owner_of_new_key(
    acting: CallerTransaction, request: admin_pb.CreateApiKeyRequest, terms: KeyTerms
) -> tuple[KeyOwner, KeyTerms]:
    """Return the owner of a key to create, and its terms, which have the role of the owner.

    Raises: InvalidValue, NotFound.
    """
    creator_id = acting.principal.person_id
    if not request.own and not request.service_account:
        return KeyOwner(creator_id=creator_id), terms
    if request.own and request.service_account:
        raise InvalidValue("own", "cannot be combined with service_account: leave one of them out")
    if request.own:
        if creator_id is None:
            raise InvalidValue(
                "own", "needs the key of a person, and this call is made with another one"
            )
        owner, role = KeyOwner(person_id=creator_id, creator_id=creator_id), terms.role
        allowed_role = acting.principal.terms.role
        scopes = SCOPES_OF_OWNED | ({"admin"} & acting.principal.scopes)
    else:
        account = await service_accounts.find_service_account(
            acting.session, request.organization, request.service_account
        )
        owner = KeyOwner(service_account_id=account.service_account_id, creator_id=creator_id)
        allowed_role, scopes = account.role, SCOPES_OF_OWNED
        role = terms.role or account.role
    if role not in ("", allowed_role):
        raise InvalidValue(
            "role", f"must be that of the owner, {allowed_role or 'none'}, or left out"
        )
    if excess := set(terms.scopes) - scopes:
        raise InvalidValue(
            "scopes", f"cannot have {min(excess)} in a key that belongs to an owner: leave it out"
        )
    return owner, replace(terms, role=role)


def check_rotates(caller: Principal, key: KeyRecord) -> None:
    """Raise PermissionDenied if the caller would get a secret of another person's own key."""
    if key.owner.person_id not in (None, caller.person_id):
        raise PermissionDenied(
            f"The key {key.prefix} belongs to a person, who alone may replace its secret. Ask that"
            " person, or revoke the key."
        )


def member_message(member: MemberRecord) -> pb.Member:
    return wire.message_of(pb.Member, member)


def invitation_message(invitation: InvitationRecord) -> pb.Invitation:
    return wire.message_of(pb.Invitation, invitation, expire_time=invitation.expires_at)


def service_account_message(account: ServiceAccountRecord) -> pb.ServiceAccount:
    return wire.message_of(pb.ServiceAccount, account)


def group_message(group: GroupRoleRecord) -> pb.ProvisionedGroup:
    return wire.message_of(pb.ProvisionedGroup, group)


def person_message(person: Person) -> pb.Person:
    return wire.message_of(pb.Person, person, person_id=person.id)


class MemberReads(AuthenticatedServicer):
    """RPCs that list members, invitations, groups, service accounts and persons."""

    ListMembers = listing(pb.ListMembersResponse, members.list_members, member_message)
    ListInvitations = listing(
        pb.ListInvitationsResponse, invitations.list_invitations, invitation_message
    )
    ListServiceAccounts = listing(
        pb.ListServiceAccountsResponse,
        service_accounts.list_service_accounts,
        service_account_message,
    )
    ListPersons = listing(pb.ListPersonsResponse, members.list_persons, person_message)
    ListProvisionedGroups = listing(
        pb.ListProvisionedGroupsResponse, provisioning.list_provisioned_groups, group_message
    )
