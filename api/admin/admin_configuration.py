"""The calls of `AdminService` that take and give the whole configuration as one document."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from weir.v1 import configuration_pb2 as pb

from api.admin.admin_calls import AdminCalls
from api.core import wire
from api.core.interceptor import Context
from api.core.messages import billing_profile_message, parse_billing_profile
from inference.routing.router import Router
from metering.configuration.applying import apply_configuration, present_state
from metering.configuration.configuration import (
    Action,
    Change,
    Configuration,
    KeySpec,
    Mistake,
    OrganizationSpec,
    PriceSpec,
    ProjectSpec,
    QuotaPlace,
    QuotaSpec,
    said_thresholds,
)
from metering.tenants.networks import in_one_form

WEIGHTS = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")

# Columns whose times the contract names as times.
NAMES = {"expires_at": "expire_time", "raised_until": "raised_until_time", "effective_at": "effective_time"}
Quotas = tuple[tuple[QuotaPlace, QuotaSpec], ...]


class Parsing:
    """A configuration being read. Whatever cannot be read is noted, and read as something that can."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def configuration(self, message: pb.Configuration) -> Configuration:
        organizations = (self.organization(f"organizations[{n}]", each) for n, each in enumerate(message.organizations))
        prices = (price_spec(f"prices[{n}]", each) for n, each in enumerate(message.prices))
        return Configuration(tuple(organizations), tuple(prices))

    def organization(self, path: str, message: pb.OrganizationConfiguration) -> OrganizationSpec:
        projects = (self.project(f"{path}.projects[{n}]", each) for n, each in enumerate(message.projects))
        quotas = self.quotas(path, message.quotas)
        profile = parse_billing_profile(message.billing_profile) if message.HasField("billing_profile") else None
        return OrganizationSpec(message.name, message.currency_code, quotas, tuple(projects), message.prune_quotas, profile)

    def project(self, path: str, message: pb.ProjectConfiguration) -> ProjectSpec:
        keys = (self.key(f"{path}.keys[{n}]", each) for n, each in enumerate(message.keys))
        quotas = self.quotas(path, message.quotas)
        return ProjectSpec(message.name, quotas, tuple(keys), message.prune_quotas, message.prune_keys)

    def key(self, path: str, message: pb.ApiKeyConfiguration) -> KeySpec:
        return KeySpec(
            name=message.name,
            prefix=message.prefix,
            scopes=tuple(sorted(set(message.scopes))) or ("inference",),
            models=tuple(sorted(set(message.models))),
            allowed_networks=in_one_form(message.allowed_networks),
            max_input_tokens=message.max_input_tokens or None,
            max_output_tokens=message.max_output_tokens or None,
            expires_at=wire.given_time(message, "expire_time", f"{path}.expire_time"),
            quotas=self.quotas(path, message.quotas),
            prune_quotas=message.prune_quotas,
        )

    def quotas(self, path: str, messages: Iterable[pb.QuotaConfiguration]) -> Quotas:
        return tuple(self.quota(f"{path}.quotas[{n}]", each) for n, each in enumerate(messages))

    def quota(self, path: str, message: pb.QuotaConfiguration) -> tuple[QuotaPlace, QuotaSpec]:
        dimension = wire.DIMENSIONS_BY_NUMBER.get(message.dimension)
        if dimension is None:
            self.mistakes.append(Mistake(f"{path}.dimension", "give what the quota counts"))
        said = {field.name for field, _ in message.ListFields()}
        given = [message.HasField("raised_limit_value"), message.HasField("raised_until_time"), bool(message.raise_reason)]
        if any(given) and not all(given):
            self.mistakes.append(
                Mistake(f"{path}.raised_limit_value", "a raise has a limit, an end and a reason: give all three or none")
            )
        place = QuotaPlace(dimension or next(iter(wire.DIMENSIONS)), message.model, message.for_new_keys)
        values = {name: getattr(message, name) for name in ("enforced", *WEIGHTS) if name in said}
        if message.HasField("alert_at"):
            values["alert_at"] = said_thresholds(place.dimension, message.alert_at.values)
        if all(given):
            values |= {"raised_limit_value": message.raised_limit_value, "raise_reason": message.raise_reason}
            values["raised_until"] = wire.parse_timestamp(message.raised_until_time, f"{path}.raised_until_time")
        return place, QuotaSpec(limit_value=message.limit_value, **values)


def price_spec(path: str, message: pb.PriceConfiguration) -> PriceSpec:
    return PriceSpec(
        model=message.model,
        currency_code=message.currency_code or ("" if message.organization else "USD"),
        organization=message.organization,
        embedding_picos_per_token=wire.given(message, "embedding_picos_per_token"),
        batch_multiplier_milli=wire.given(message, "batch_multiplier_milli"),
        effective_at=wire.given_time(message, "effective_time", f"{path}.effective_time"),
        input_picos_per_token=message.input_picos_per_token,
        cached_input_picos_per_token=message.cached_input_picos_per_token,
        output_picos_per_token=message.output_picos_per_token,
    )


def configuration_message(configuration: Configuration) -> pb.Configuration:
    return pb.Configuration(
        organizations=[
            pb.OrganizationConfiguration(
                name=organization.name,
                currency_code=organization.currency_code,
                quotas=map(quota_message, organization.quotas),
                projects=map(project_message, organization.projects),
                billing_profile=(
                    None if organization.billing_profile is None else billing_profile_message(organization.billing_profile)
                ),
            )
            for organization in configuration.organizations
        ],
        prices=[wire.message_of(pb.PriceConfiguration, price, effective_time=None) for price in configuration.prices],
    )


def project_message(project: ProjectSpec) -> pb.ProjectConfiguration:
    keys = (
        wire.message_of(
            pb.ApiKeyConfiguration,
            key,
            expire_time=key.expires_at,
            quotas=map(quota_message, key.quotas),
            prune_quotas=None,
        )
        for key in project.keys
    )
    return pb.ProjectConfiguration(name=project.name, quotas=map(quota_message, project.quotas), keys=keys)


def quota_message(quota: tuple[QuotaPlace, QuotaSpec]) -> pb.QuotaConfiguration:
    """One limit; what is as usual stays unset."""
    place, spec = quota
    message = place_message(place)
    usual = QuotaSpec(limit_value=spec.limit_value)
    message.limit_value = spec.limit_value
    for name in ("enforced", *WEIGHTS):
        if getattr(spec, name) != getattr(usual, name):
            setattr(message, name, getattr(spec, name))
    if spec.alert_at is not None:
        message.alert_at.SetInParent()
        message.alert_at.values.extend(spec.alert_at)
    if spec.raised_until is not None:
        message.raised_limit_value = spec.raised_limit_value or 0
        message.raised_until_time.FromDatetime(spec.raised_until)
        message.raise_reason = spec.raise_reason or ""
    return message


def place_message(place: QuotaPlace) -> pb.QuotaConfiguration:
    dimension = wire.DIMENSIONS[place.dimension]
    return pb.QuotaConfiguration(dimension=dimension, model=place.model, for_new_keys=place.for_new_keys)


def change_message(change: Change, *, secrets: bool) -> pb.ConfigurationChange:
    """What was done. secrets: whether those of new keys hold; after a dry run they do not."""
    is_unmade = change.kind == "key" and change.action is Action.CREATE and not secrets
    return wire.message_of(
        pb.ConfigurationChange,
        change,
        quota=None if change.quota is None else place_message(change.quota),
        fields=[
            pb.FieldChange(
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
    """As JSON; empty for none."""
    return "" if value is None else json.dumps(value, **form)


class ConfigurationCalls(AdminCalls):
    """See `proto/weir/v1/configuration.proto`."""

    _router: Router

    async def ApplyConfiguration(self, request: pb.ApplyConfigurationRequest, context: Context) -> pb.ApplyConfigurationResponse:
        """Makes what is into what should be; a dry run does the same and undoes it."""
        async with self._acting(context, alone=True) as acting:
            parsing = Parsing()
            wanted = parsing.configuration(request.configuration)
            work = await apply_configuration(
                acting.session,
                wanted,
                actor=acting.actor,
                own_key_id=acting.principal.api_key_id,
                own_address=acting.principal.address,
                models=[model.name for model in self._router.models()],
                dry_run=request.dry_run or bool(parsing.mistakes),
            )
            if mistakes := [*parsing.mistakes, *work.mistakes]:
                await acting.session.rollback()
                told = [pb.ConfigurationMistake(field=each.path, description=each.message) for each in mistakes]
                return pb.ApplyConfigurationResponse(mistakes=told)
            if request.dry_run:
                await acting.session.rollback()
            changes = [change_message(change, secrets=not request.dry_run) for change in work.changes]
            kept = [change_message(change, secrets=False) for change in work.kept]
            return pb.ApplyConfigurationResponse(changes=changes, kept=kept)

    async def ExportConfiguration(self, request: pb.ExportConfigurationRequest, context: Context) -> pb.ExportConfigurationResponse:
        async with self._acting(context, alone=True) as acting:
            present = await present_state(acting.session, organization=request.organization or None)
            return pb.ExportConfigurationResponse(configuration=configuration_message(present))
