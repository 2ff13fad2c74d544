"""From the messages about running requests and configurations to their values."""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict
from weir.v1 import configuration_pb2, live_requests_pb2

from weir_client import live, wire
from weir_client.wire import seconds_of, time_of

PHASES = {
    number: live.RequestPhase(name.removeprefix("REQUEST_PHASE_").lower())
    for name, number in live_requests_pb2.RequestPhase.items()
}
RESULTS = {
    number: live.KillResult(name.removeprefix("RESULT_").lower().replace("_", "-"))
    for name, number in live_requests_pb2.KillRequestResponse.Result.items()
}
ACTIONS = {
    number: live.ChangeAction(name.removeprefix("ACTION_").lower())
    for name, number in configuration_pb2.ConfigurationChange.Action.items()
}


def live_view(message: live_requests_pb2.ListLiveRequestsResponse) -> live.LiveView:
    """What runs."""
    return live.LiveView(
        requests=tuple(map(live_request, message.requests)),
        organizations=tuple(
            live.LiveOrganization(
                organization_id=each.organization_id,
                name=each.name,
                request_count=each.request_count,
                hold_count=each.hold_count,
                held_token_count=each.held_token_count,
                tokens_per_second=each.tokens_per_second,
            )
            for each in message.organizations
        ),
        request_count=message.request_count,
        silent_owner_ids=tuple(message.silent_owner_ids),
    )


def live_request(message: live_requests_pb2.LiveRequest) -> live.LiveRequest:
    """One request."""
    return live.LiveRequest(
        request_id=message.request_id,
        organization_id=message.organization_id,
        organization_name=message.organization_name,
        project_id=message.project_id,
        project_name=message.project_name,
        api_key_id=message.api_key_id,
        api_key_prefix=message.api_key_prefix,
        model=message.model,
        phase=PHASES.get(message.phase, live.RequestPhase.UNSPECIFIED),
        age_s=seconds_of(message.age),
        input_token_count=message.input_token_count,
        cached_input_token_count=message.cached_input_token_count,
        delivered_token_count=message.delivered_token_count,
        tokens_per_second=message.tokens_per_second,
        leased_token_count=message.leased_token_count,
        admit_time=time_of(message.admit_time) if message.HasField("admit_time") else None,
        expire_time=time_of(message.expire_time) if message.HasField("expire_time") else None,
        owner_id=message.owner_id,
        owner_name=message.owner_name,
    )


def recorded(message: live_requests_pb2.GetRequestResponse) -> live.RecordedRequest:
    """A request and whose it is."""
    return live.RecordedRequest(
        wire.generation(message.generation), message.organization_name, message.project_name, message.api_key_prefix
    )


def killed(message: live_requests_pb2.KillRequestResponse) -> live.KilledRequest:
    """A request that was ended."""
    return live.KilledRequest(
        result=RESULTS.get(message.result, live.KillResult.UNSPECIFIED),
        generation=wire.generation(message.generation) if message.HasField("generation") else None,
        expire_time=time_of(message.expire_time) if message.HasField("expire_time") else None,
    )


def applied(message: configuration_pb2.ApplyConfigurationResponse) -> live.AppliedConfiguration:
    """What was done."""
    return live.AppliedConfiguration(
        changes=tuple(map(change, message.changes)),
        kept=tuple(map(change, message.kept)),
        mistakes=tuple(live.ConfigurationMistake(each.field, each.description) for each in message.mistakes),
    )


def change(message: configuration_pb2.ConfigurationChange) -> live.ConfigurationChange:
    """One difference."""
    return live.ConfigurationChange(
        action=ACTIONS.get(message.action, live.ChangeAction.UNSPECIFIED),
        kind=message.kind,
        path=message.path,
        fields=tuple(live.FieldChange(each.field, each.before_json or None, each.after_json or None) for each in message.fields),
        quota=MessageToDict(message.quota, preserving_proto_field_name=True) if message.HasField("quota") else {},
        api_key_prefix=message.api_key_prefix,
        secret=message.secret,
    )
