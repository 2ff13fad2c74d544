"""RPCs that apply and export configurations, and the conversion of their messages."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

from weir.v1 import admin_service_pb2 as pb
from weir.v1 import configuration_pb2
from weir.v1.types_pb2 import AlertThresholds

from api.access.servicer import AuthenticatedServicer
from api.admin.token_calls import check_sources
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import parse_billing_profile
from inference.routing.router import Router
from metering.configuration.access import IssuerSpec, MemberSpec
from metering.configuration.configuration import (
    VIOLATION_COUNT_MAX,
    Action,
    Attempts,
    Change,
    Configuration,
    ConfigurationViolation,
    KeySpec,
    OrganizationSpec,
    ProjectSpec,
    QuotaSpec,
    apply_configuration,
    present_state,
    stated_thresholds,
)
from metering.core.errors import InvalidValue
from metering.core.models import QuotaDimension, QuotaKey, QuotaTerms, record_of, values_of
from metering.invoicing.documents import check_shown
from metering.invoicing.invoice_document import Issuer
from metering.pricing.prices import PriceTerms
from metering.pricing.resale_prices import ResaleTerms
from metering.quotas.quota_admin import THRESHOLDS_MAX
from metering.tenants.authentication import Principal
from metering.tenants.key_terms import effective_scopes
from metering.tenants.networks import normalized
from metering.tenants.token_issuers import IssuerTerms

InThread = Callable[[Principal, int, Callable[[], Any]], Awaitable[Any]]


# Names in messages of columns that hold times.
NAMES = {
    "expires_at": "expire_time",
    "override_until": "override_end_time",
    "effective_at": "effective_time",
}


# Messages that state a limit.
QuotaMessage = pb.SetQuotaRequest | pb.PreviewQuotaRequest | configuration_pb2.QuotaConfiguration
Quotas = tuple[tuple[QuotaKey, QuotaSpec], ...]


async def at_once(principal: Principal, size: int, call: Callable[[], Any]) -> Any:
    """Run the call on the event loop: default for `in_thread`."""
    return call()


class ConfigurationCalls(AuthenticatedServicer):
    """RPCs for configurations."""

    _router: Router
    _issuer: Issuer
    _in_thread: InThread
    _private_issuers: bool

    async def ApplyConfiguration(
        self, request: configuration_pb2.ApplyConfigurationRequest, context: Context
    ) -> configuration_pb2.ApplyConfigurationResponse:
        """Apply a configuration and return the changes. A dry run makes no changes."""
        async with self._acting(context, alone=True) as acting:
            parsing, size = Parsing(self._private_issuers), request.ByteSize()
            requested = await self._in_thread(
                acting.principal, size, partial(parsing.configuration, request.configuration)
            )
            work = await apply_configuration(
                acting.session,
                requested,
                actor=acting.actor,
                own_key_id=acting.principal.api_key_id,
                own_address=acting.principal.address,
                models=[model.name for model in self._router.models()],
                regions=self._router.regions(),
                check_profile=partial(check_shown, issuer=self._issuer),
                dry_run=request.dry_run or bool(parsing.violations),
            )
            if violations := [*parsing.violations, *work.violations]:
                await acting.session.rollback()
                messages = [
                    configuration_pb2.ConfigurationViolation(
                        field=each.path, description=each.message
                    )
                    for each in violations[:VIOLATION_COUNT_MAX]
                ]
                if rest := violations[VIOLATION_COUNT_MAX:]:
                    more = f"and {len(rest)} more"
                    messages.append(configuration_pb2.ConfigurationViolation(description=more))
                return configuration_pb2.ApplyConfigurationResponse(violations=messages)
            if request.dry_run:
                await acting.session.rollback()
            answer: configuration_pb2.ApplyConfigurationResponse = await self._in_thread(
                acting.principal, size, partial(answer_of, work, secrets=not request.dry_run)
            )
            return answer

    async def ExportConfiguration(
        self, request: configuration_pb2.ExportConfigurationRequest, context: Context
    ) -> configuration_pb2.ExportConfigurationResponse:
        async with self._acting(context, alone=True) as acting:
            present = await present_state(acting.session, organization=request.organization or None)
            exported = await self._in_thread(
                acting.principal, 0, partial(configuration_message, present)
            )
            return configuration_pb2.ExportConfigurationResponse(configuration=exported)


class Parsing:
    """Parser of a configuration message. It collects violations, and replaces invalid values."""

    def __init__(self, private_issuers: bool = False) -> None:
        """`private_issuers` allows issuers of tokens in private networks."""
        self._private_issuers = private_issuers
        self.violations: list[ConfigurationViolation] = []

    def configuration(self, message: configuration_pb2.Configuration) -> Configuration:
        organizations = (
            self.organization(f"organizations[{n}]", each)
            for n, each in enumerate(message.organizations)
        )
        prices = (price_terms(each, f"prices[{n}].") for n, each in enumerate(message.prices))
        return Configuration(tuple(organizations), tuple(prices))

    def organization(
        self, path: str, message: configuration_pb2.OrganizationConfiguration
    ) -> OrganizationSpec:
        projects = (
            self.project(f"{path}.projects[{n}]", each) for n, each in enumerate(message.projects)
        )
        quotas = self.quotas(path, message.quotas)
        profile = (
            parse_billing_profile(message.billing_profile)
            if message.HasField("billing_profile")
            else None
        )
        return OrganizationSpec(
            message.name,
            message.currency_code,
            quotas,
            tuple(projects),
            message.prune_quotas,
            profile,
            tuple(
                resale_terms(each, f"{path}.resale_prices[{n}]")
                for n, each in enumerate(message.resale_prices)
            ),
            message.prune_resale_prices,
            wire.given(message, "queue_weight_milli"),
            wire.given(message, "region"),
            tuple(record_of(MemberSpec, each) for each in message.members),
            message.prune_members,
            tuple(
                self.token_issuer(f"{path}.token_issuers[{n}]", each)
                for n, each in enumerate(message.token_issuers)
            ),
            message.prune_token_issuers,
        )

    def token_issuer(
        self, path: str, message: configuration_pb2.TokenIssuerConfiguration
    ) -> IssuerSpec:
        terms = wire.stated_terms(message, IssuerTerms)
        spec = IssuerSpec(
            **terms,
            projects=tuple(sorted(message.projects)),
            models=tuple(sorted(set(message.models))),
            max_input_tokens=message.max_input_tokens or None,
            max_output_tokens=message.max_output_tokens or None,
            allowed_networks=normalized(message.allowed_networks),
            group=message.group,
        )
        try:
            check_sources(spec, private=self._private_issuers)
        except InvalidValue as wrong:
            at = f"{path}.{wrong.field}"
            self.violations.append(ConfigurationViolation(at, wrong.remedy))
        return spec

    def project(self, path: str, message: configuration_pb2.ProjectConfiguration) -> ProjectSpec:
        keys = (self.key(f"{path}.keys[{n}]", each) for n, each in enumerate(message.keys))
        quotas = self.quotas(path, message.quotas)
        return ProjectSpec(
            message.name, quotas, tuple(keys), message.prune_quotas, message.prune_keys
        )

    def key(self, path: str, message: configuration_pb2.ApiKeyConfiguration) -> KeySpec:
        return record_of(
            KeySpec,
            message,
            scopes=tuple(sorted(effective_scopes(message.scopes, message.role))),
            models=tuple(sorted(set(message.models))),
            allowed_networks=normalized(message.allowed_networks),
            max_input_tokens=message.max_input_tokens or None,
            max_output_tokens=message.max_output_tokens or None,
            expires_at=wire.given_time(message, "expire_time", f"{path}.expire_time"),
            quotas=self.quotas(path, message.quotas),
        )

    def quotas(self, path: str, messages: Iterable[configuration_pb2.QuotaConfiguration]) -> Quotas:
        return tuple(self.quota(f"{path}.quotas[{n}]", each) for n, each in enumerate(messages))

    def quota(
        self, path: str, message: configuration_pb2.QuotaConfiguration
    ) -> tuple[QuotaKey, QuotaSpec]:
        dimension = wire.DIMENSIONS_BY_NUMBER.get(message.dimension)
        if dimension is None:
            self.violations.append(
                ConfigurationViolation(
                    f"{path}.dimension", "is required: name the dimension of the quota"
                )
            )
        given = [
            message.HasField("override_limit_value"),
            message.HasField("override_end_time"),
            bool(message.override_reason),
        ]
        if any(given) and not all(given):
            self.violations.append(
                ConfigurationViolation(
                    f"{path}.override_limit_value",
                    "a temporary override has a limit, an end and a reason: set all three or none",
                )
            )
        key = quota_key(dimension or next(iter(wire.DIMENSION_NUMBERS)), message)
        values = stated_terms(message)
        if "alert_at" in values:
            values["alert_at"] = stated_thresholds(key.dimension, values["alert_at"])
        if all(given):
            values |= {
                "override_limit_value": message.override_limit_value,
                "override_reason": message.override_reason,
            }
            values["override_until"] = wire.parse_timestamp(
                message.override_end_time, f"{path}.override_end_time"
            )
        return key, QuotaSpec(**values)


def stated_terms(
    message: QuotaMessage,
) -> dict[str, Any]:
    """Read the terms of a limit that a message states, by name."""
    terms = wire.stated_terms(message, QuotaTerms)
    if not isinstance(message, pb.PreviewQuotaRequest) and "alert_at" in terms:
        terms["alert_at"] = tuple(message.alert_at.values[: THRESHOLDS_MAX + 1])
    return terms


def price_terms(
    message: pb.SetPriceRequest | configuration_pb2.PriceConfiguration, path: str = ""
) -> PriceTerms:
    """Read the terms of a price. `path` precedes the name of a field in errors."""
    terms = wire.stated_terms(message, PriceTerms)
    terms["currency_code"] = message.currency_code or ("" if message.organization else "USD")
    effective_at = wire.given_time(message, "effective_time", f"{path}effective_time")
    return PriceTerms(**terms, effective_at=effective_at)


def resale_terms(message: configuration_pb2.ResalePriceConfiguration, path: str) -> ResaleTerms:
    effective_at = wire.given_time(message, "effective_time", f"{path}.effective_time")
    return ResaleTerms(**wire.stated_terms(message, ResaleTerms), effective_at=effective_at)


def configuration_message(configuration: Configuration) -> configuration_pb2.Configuration:
    return configuration_pb2.Configuration(
        organizations=[
            wire.message_of(
                configuration_pb2.OrganizationConfiguration,
                organization,
                quotas=map(quota_message, organization.quotas),
                projects=map(project_configuration, organization.projects),
                token_issuers=map(issuer_configuration, organization.token_issuers),
                members=[
                    wire.message_of(configuration_pb2.MemberConfiguration, each)
                    for each in organization.members
                ],
                resale_prices=[
                    wire.message_of(
                        configuration_pb2.ResalePriceConfiguration, price, effective_time=None
                    )
                    for price in organization.resale_prices
                ],
            )
            for organization in configuration.organizations
        ],
        prices=[
            wire.message_of(configuration_pb2.PriceConfiguration, price, effective_time=None)
            for price in configuration.prices
        ],
    )


def issuer_configuration(spec: IssuerSpec) -> configuration_pb2.TokenIssuerConfiguration:
    return wire.message_of(configuration_pb2.TokenIssuerConfiguration, spec)


def project_configuration(project: ProjectSpec) -> configuration_pb2.ProjectConfiguration:
    keys = (
        wire.message_of(
            configuration_pb2.ApiKeyConfiguration,
            key,
            expire_time=key.expires_at,
            quotas=map(quota_message, key.quotas),
            prune_quotas=None,
        )
        for key in project.keys
    )
    return configuration_pb2.ProjectConfiguration(
        name=project.name, quotas=map(quota_message, project.quotas), keys=keys
    )


def quota_message(quota: tuple[QuotaKey, QuotaSpec]) -> configuration_pb2.QuotaConfiguration:
    """Convert a quota to a message. Fields with default values stay unset."""
    key, spec = quota
    usual, stated = (values_of(QuotaTerms, each) for each in (QuotaTerms(0), spec))
    terms = {name: None if value == usual[name] else value for name, value in stated.items()}
    if spec.alert_at is not None:
        terms["alert_at"] = AlertThresholds(values=spec.alert_at)
    kind, until = configuration_pb2.QuotaConfiguration, spec.override_until
    return wire.message_of(kind, spec, **_identity(key), **terms, override_end_time=until)


def quota_key(dimension: QuotaDimension, message: QuotaMessage) -> QuotaKey:
    """Read what identifies a limit among those of its subject."""
    return record_of(QuotaKey, message, dimension=dimension)


def quota_key_message(key: QuotaKey) -> configuration_pb2.QuotaConfiguration:
    dimension = wire.DIMENSION_NUMBERS[key.dimension]
    return configuration_pb2.QuotaConfiguration(**_identity(key) | {"dimension": dimension})


def _identity(key: QuotaKey) -> dict[str, Any]:
    """Return the fields of a limit's identity; all limits of a configuration are the operator's."""
    return {name: value for name, value in asdict(key).items() if name != "set_by_organization"}


def answer_of(work: Attempts, *, secrets: bool) -> configuration_pb2.ApplyConfigurationResponse:
    return configuration_pb2.ApplyConfigurationResponse(
        changes=[change_message(change, secrets=secrets) for change in work.changes],
        kept=[change_message(change, secrets=False) for change in work.kept],
    )


def change_message(change: Change, *, secrets: bool) -> configuration_pb2.ConfigurationChange:
    """Convert a change to a message. Secrets of new keys are left out unless `secrets`."""
    is_unmade = change.kind == "key" and change.action is Action.CREATE and not secrets
    return wire.message_of(
        configuration_pb2.ConfigurationChange,
        change,
        quota=None if change.quota is None else quota_key_message(change.quota),
        fields=[
            configuration_pb2.FieldChange(
                field=NAMES.get(each.name, each.name),
                before_json=json_text(each.before, ensure_ascii=False),
                after_json=json_text(each.after, ensure_ascii=False),
            )
            for each in change.fields
        ],
        api_key_prefix="" if is_unmade else change.key_prefix,
        secret=change.secret if secrets else "",
    )


def json_text(value: object, **form: Any) -> str:
    """Encode a value as JSON. None becomes an empty string."""
    return "" if value is None else json.dumps(value, **form)
