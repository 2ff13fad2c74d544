"""The asyncio clients of the admin and billing APIs: organizations, projects, keys, quotas, prices, audit, month reports."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc.aio import UnaryUnaryMultiCallable
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import admin_service_pb2_grpc, billing_service_pb2_grpc
from weir.v1 import billing_service_pb2 as billing_pb

from weir_client import wire, wire_accounts
from weir_client.accounts import ApiKey, AuditEntry, CreatedApiKey, MonthReport, Organization, Project
from weir_client.connection import UNARY_TIMEOUT_S, Connection, ConnectionSettings
from weir_client.values import QuotaDimension, QuotaStatus, QuotaSubject

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class UnaryClient:
    """A client of unary calls only: opening, closing, and where to connect."""

    key_variables: ClassVar[tuple[str, ...]] = ("WEIR_ADMIN_KEY", "WEIR_API_KEY")

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        tls: bool | None = None,
        root_certificates: bytes | str | Path | None = None,
        timeout: float = UNARY_TIMEOUT_S,
    ) -> None:
        """Settles where to connect: see `AsyncClient`. The key comes from `WEIR_ADMIN_KEY` first, then `WEIR_API_KEY`.

        timeout: seconds for each call, retries included. Raises: Unauthenticated if there is no key.
        """
        self._settings = ConnectionSettings.resolve(
            address, api_key, key_variables=self.key_variables, tls=tls, root_certificates=root_certificates
        )
        self._timeout_s = timeout
        self._connection: Connection | None = None

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._settings.address

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise RuntimeError("this client is open already")
        self._connection = Connection(self._settings)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _opened(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the client is not open: use it inside `with`")
        return self._connection

    async def _call(
        self, method: UnaryUnaryMultiCallable[_Request, _Response], request: _Request, *, idempotent: bool = True
    ) -> _Response:
        return await self._opened().call(method, request, timeout=self._timeout_s, idempotent=idempotent)


class AsyncAdminClient(UnaryClient):
    """Manages who may use the service, and how much. Needs a key with the scope `admin`.

    Organizations, projects and keys are named as the admin API takes them: a name or an id, `organization/project`, a key's
    prefix. Every call raises WeirError: NotFound for an unknown name, AlreadyExists for a taken one, InvalidRequest for a bad
    value.
    """

    async def create_organization(self, name: str, *, currency_code: str = "USD") -> Organization:
        """A new customer, billed in one currency (ISO 4217)."""
        request = admin_pb.CreateOrganizationRequest(name=name, currency_code=currency_code)
        response = await self._call(self._stub.CreateOrganization, request, idempotent=False)
        return wire_accounts.organization(response.organization)

    async def list_organizations(self) -> list[Organization]:
        """All customers, by name."""
        request = admin_pb.ListOrganizationsRequest()
        response = await self._call(self._stub.ListOrganizations, request)
        return [wire_accounts.organization(each) for each in response.organizations]

    async def create_project(self, organization: str, name: str) -> Project:
        """A new project of an organization."""
        request = admin_pb.CreateProjectRequest(organization=organization, name=name)
        response = await self._call(self._stub.CreateProject, request, idempotent=False)
        return wire_accounts.project(response.project)

    async def list_projects(self, organization: str) -> list[Project]:
        """The projects of an organization, by name."""
        request = admin_pb.ListProjectsRequest(organization=organization)
        response = await self._call(self._stub.ListProjects, request)
        return [wire_accounts.project(each) for each in response.projects]

    async def create_api_key(
        self,
        organization: str,
        project: str,
        name: str,
        *,
        scopes: Sequence[str] = ("inference",),
        lifetime: timedelta | None = None,
    ) -> CreatedApiKey:
        """A new key; its secret is told here and never again. `lifetime` None: it works until it is revoked."""
        request = admin_pb.CreateApiKeyRequest(organization=organization, project=project, name=name, scopes=scopes)
        if lifetime is not None:
            duration = Duration()
            duration.FromTimedelta(lifetime)
            request.lifetime.CopyFrom(duration)
        response = await self._call(self._stub.CreateApiKey, request, idempotent=False)
        return CreatedApiKey(wire_accounts.api_key(response.api_key), response.secret)

    async def revoke_api_key(self, api_key: str) -> ApiKey:
        """Ends a key for good, by id or prefix. Doing it twice changes nothing."""
        request = admin_pb.RevokeApiKeyRequest(api_key=api_key)
        response = await self._call(self._stub.RevokeApiKey, request)
        return wire_accounts.api_key(response.api_key)

    async def list_api_keys(self, organization: str = "") -> list[ApiKey]:
        """The keys of one organization, or all, newest first."""
        request = admin_pb.ListApiKeysRequest(organization=organization)
        response = await self._call(self._stub.ListApiKeys, request)
        return [wire_accounts.api_key(each) for each in response.api_keys]

    async def set_quota(
        self, subject: QuotaSubject, subject_ref: str, dimension: QuotaDimension, limit_value: int, *, model: str = ""
    ) -> QuotaStatus:
        """Sets one limit, in requests, tokens or picos by dimension; what was used stays counted. 0 lets nothing in."""
        request = admin_pb.SetQuotaRequest(
            subject=wire_accounts.SUBJECT_NUMBERS[subject],
            subject_ref=subject_ref,
            model=model,
            dimension=wire_accounts.DIMENSION_NUMBERS[dimension],
            limit_value=limit_value,
        )
        response = await self._call(self._stub.SetQuota, request)
        return wire.quota(response.quota)

    async def delete_quota(self, quota_id: str) -> None:
        """Removes one limit."""
        request = admin_pb.DeleteQuotaRequest(quota_id=quota_id)
        await self._call(self._stub.DeleteQuota, request, idempotent=False)

    async def list_quotas(self, organization: str = "") -> list[QuotaStatus]:
        """The limits of one organization with its projects and keys, or all, with what is left of each."""
        request = admin_pb.ListQuotasRequest(organization=organization)
        response = await self._call(self._stub.ListQuotas, request)
        return [wire.quota(each) for each in response.quotas]

    async def set_price(
        self,
        model: str,
        *,
        input_picos_per_token: int,
        cached_input_picos_per_token: int,
        output_picos_per_token: int,
        currency_code: str = "USD",
        effective_time: datetime | None = None,
    ) -> int:
        """Adds a price version and returns its number. `effective_time` None: from now on; an aware datetime otherwise."""
        request = admin_pb.SetPriceRequest(
            model=model,
            currency_code=currency_code,
            input_picos_per_token=input_picos_per_token,
            cached_input_picos_per_token=cached_input_picos_per_token,
            output_picos_per_token=output_picos_per_token,
        )
        if effective_time is not None:
            stamp = Timestamp()
            stamp.FromDatetime(effective_time)
            request.effective_time.CopyFrom(stamp)
        response = await self._call(self._stub.SetPrice, request, idempotent=False)
        return response.version

    async def list_audit_entries(self, *, page_size: int = 100, before_entry_id: int = 0) -> list[AuditEntry]:
        """Changes, newest first; the next page begins before the last `entry_id` of this one."""
        request = admin_pb.ListAuditEntriesRequest(page_size=page_size, before_entry_id=before_entry_id)
        response = await self._call(self._stub.ListAuditEntries, request)
        return [wire_accounts.audit_entry(each) for each in response.entries]

    @property
    def _stub(self) -> admin_service_pb2_grpc.AdminServiceAsyncStub:
        return admin_service_pb2_grpc.AdminServiceStub(self._opened().channel)


class AsyncBillingClient(UnaryClient):
    """Reads the bill. Needs a key with the scope `billing` (its own organization only) or `admin`."""

    async def get_month_report(self, organization: str, month: str) -> MonthReport:
        """One calendar month (UTC, `YYYY-MM`) of an organization. Raises: NotFound, InvalidRequest; any WeirError."""
        request = billing_pb.GetMonthReportRequest(organization=organization, month=month)
        stub = billing_service_pb2_grpc.BillingServiceStub(self._opened().channel)
        response = await self._call(stub.GetMonthReport, request)
        return wire_accounts.month_report(response)
