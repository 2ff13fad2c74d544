"""The blocking twin of the admin client."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self, Unpack

from weir_client.accounts import ApiKey, AuditEntry, CreatedApiKey, Organization, Project, RotatedApiKey
from weir_client.admin import AsyncAdminClient
from weir_client.admin_terms import TermCalls
from weir_client.connection import UNARY_TIMEOUT_S
from weir_client.loop_thread import LoopThread
from weir_client.tls import TlsOptions
from weir_client.values import QuotaDimension, QuotaStatus, QuotaSubject


class AdminClient(TermCalls):
    """Manages who may use the service, and how much. See `AsyncAdminClient` for every call and its errors."""

    _client: AsyncAdminClient

    def __init__(
        self,
        address: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = UNARY_TIMEOUT_S,
        **tls: Unpack[TlsOptions],
    ) -> None:
        """Settles where to connect. Raises: Unauthenticated if there is no key."""
        self._client = AsyncAdminClient(address, api_key, timeout=timeout, **tls)
        self._thread = LoopThread(self._client)

    @property
    def address(self) -> str:
        """Where this client connects to."""
        return self._client.address

    def create_organization(
        self, name: str, *, currency_code: str = "USD", allow_existing: bool = False, request_id: str | None = None
    ) -> Organization:
        """A new customer, billed in one currency (ISO 4217)."""
        return self._thread.run(
            lambda: self._client.create_organization(
                name, currency_code=currency_code, allow_existing=allow_existing, request_id=request_id
            )
        )

    def list_organizations(self) -> list[Organization]:
        """All customers, by name."""
        return self._thread.run(self._client.list_organizations)

    def create_project(
        self, organization: str, name: str, *, allow_existing: bool = False, request_id: str | None = None
    ) -> Project:
        """A new project of an organization."""
        return self._thread.run(
            lambda: self._client.create_project(organization, name, allow_existing=allow_existing, request_id=request_id)
        )

    def list_projects(self, organization: str) -> list[Project]:
        """The projects of an organization, by name."""
        return self._thread.run(lambda: self._client.list_projects(organization))

    def create_api_key(
        self,
        organization: str,
        project: str,
        name: str,
        *,
        scopes: Sequence[str] = ("inference",),
        models: Sequence[str] = (),
        lifetime: timedelta | None = None,
        allow_existing: bool = False,
        request_id: str = "",
    ) -> CreatedApiKey:
        """A new key; its secret is told here and never again."""
        return self._thread.run(
            lambda: self._client.create_api_key(
                organization,
                project,
                name,
                scopes=scopes,
                models=models,
                lifetime=lifetime,
                allow_existing=allow_existing,
                request_id=request_id,
            )
        )

    def rotate_api_key(self, api_key: str, *, overlap: timedelta | None = None, request_id: str = "") -> RotatedApiKey:
        """A new secret for a key; the old one works for `overlap`, a day if None."""
        return self._thread.run(lambda: self._client.rotate_api_key(api_key, overlap=overlap, request_id=request_id))

    def update_api_key(
        self,
        api_key: str,
        *,
        name: str | None = None,
        scopes: Sequence[str] = (),
        models: Sequence[str] = (),
        all_models: bool = False,
        expire_time: datetime | None = None,
        never_expires: bool = False,
    ) -> ApiKey:
        """Changes what is given of a key."""
        return self._thread.run(
            lambda: self._client.update_api_key(
                api_key,
                name=name,
                scopes=scopes,
                models=models,
                all_models=all_models,
                expire_time=expire_time,
                never_expires=never_expires,
            )
        )

    def revoke_api_key(self, api_key: str) -> ApiKey:
        """Ends a key for good, by id or prefix."""
        return self._thread.run(lambda: self._client.revoke_api_key(api_key))

    def list_api_keys(self, organization: str = "") -> list[ApiKey]:
        """The keys of one organization, or all, newest first."""
        return self._thread.run(lambda: self._client.list_api_keys(organization))

    def set_quota(
        self,
        subject: QuotaSubject,
        subject_ref: str,
        dimension: QuotaDimension,
        limit_value: int,
        *,
        model: str = "",
        input_weight_milli: int | None = None,
        cached_input_weight_milli: int | None = None,
        output_weight_milli: int | None = None,
        enforced: bool | None = None,
        for_new_keys: bool = False,
    ) -> QuotaStatus:
        """Sets one limit, in requests, tokens or picos by dimension."""
        return self._thread.run(
            lambda: self._client.set_quota(
                subject,
                subject_ref,
                dimension,
                limit_value,
                model=model,
                input_weight_milli=input_weight_milli,
                cached_input_weight_milli=cached_input_weight_milli,
                output_weight_milli=output_weight_milli,
                enforced=enforced,
                for_new_keys=for_new_keys,
            )
        )

    def raise_quota(self, quota_id: str, limit_value: int, expire_time: datetime, reason: str) -> QuotaStatus:
        """Lets a higher limit hold until a time."""
        return self._thread.run(lambda: self._client.raise_quota(quota_id, limit_value, expire_time, reason))

    def end_quota_raise(self, quota_id: str) -> QuotaStatus:
        """Ends a raise before its time."""
        return self._thread.run(lambda: self._client.end_quota_raise(quota_id))

    def delete_quota(self, quota_id: str, *, allow_missing: bool = False) -> bool:
        """Removes one limit, and tells whether it was there."""
        return self._thread.run(lambda: self._client.delete_quota(quota_id, allow_missing=allow_missing))

    def list_quotas(self, organization: str = "") -> list[QuotaStatus]:
        """The limits of one organization with its projects and keys, or all."""
        return self._thread.run(lambda: self._client.list_quotas(organization))

    def list_key_quotas(self, api_key: str, model: str = "") -> list[QuotaStatus]:
        """Every limit that a key meets: its own and those further up, and which of them bind."""
        return self._thread.run(lambda: self._client.list_key_quotas(api_key, model))

    def list_audit_entries(
        self,
        *,
        page_size: int = 100,
        before_entry_id: int = 0,
        subject: str = "",
        actor: str = "",
        action_prefix: str = "",
        start_time: datetime | None = None,
        end_time: datetime | None = None,
    ) -> list[AuditEntry]:
        """Changes, newest first, of a subject, an actor, a kind, a time."""
        return self._thread.run(
            lambda: self._client.list_audit_entries(
                page_size=page_size,
                before_entry_id=before_entry_id,
                subject=subject,
                actor=actor,
                action_prefix=action_prefix,
                start_time=start_time,
                end_time=end_time,
            )
        )

    def __enter__(self) -> Self:
        self._thread.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.close()
