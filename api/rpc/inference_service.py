"""`InferenceService`: generate, count tokens, list models and quotas, quote, look up, embed, own
usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import tokens_pb2 as token_pb
from weir.v1 import usage_reports_pb2 as usage_pb

from api.access.auth import Authenticator, StreamKey, bearer_token, check_model, metadata_values
from api.access.servicer import Reports
from api.core import wire
from api.core.addresses import FORWARDED_FOR, Origin
from api.core.errors import (
    AddressNotAllowed,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
)
from api.core.interceptor import IS_COSTLY, METHOD, Context
from api.core.messages import (
    effective_quota_statuses,
    find_generation,
    groupings,
    models_for,
    own_usage_message,
    restrictions,
)
from api.core.texts import Violations
from api.generation.parsing.embed_request import parse_embed
from api.generation.parsing.start_frame import parse_count_tokens
from api.generation.request.caller import Caller, on_behalf, own_end_user
from api.generation.request.client_tokens import create_client_token, revoke_client_tokens
from api.generation.request.live_embedding import LiveEmbedding
from api.generation.request.peers import VOUCHER, vouched_address, voucher_of
from api.generation.request.quoting import (
    count_tokens,
    parse_quoted_embed,
    parse_quoted_start,
    quote,
    quote_embed,
)
from api.generation.request.registry import RequestRegistry
from api.observability.spans import trace_of_metadata
from api.rpc.client_stream import ClientStream, remaining_s
from api.rpc.open_streams import OpenStreams
from metering.alerts.alerts import latest_key_change
from metering.control.live import certificate_of
from metering.core.retained import request_not_found
from metering.quotas.quota_states import member_quotas_for, quotas_for
from metering.reports.usage_reports import (
    Groups,
    UsageFilter,
    find_end_user_id,
    own_usage,
    period_of,
    utc_date,
)
from metering.store.db import Sessions, database_now
from metering.tenants.authentication import Principal

Request = TypeVar("Request", bound=Message)
Parsed = TypeVar("Parsed")

FIRST_MESSAGE_WAIT_S = 5.0  # for the message of a refused stream, which is on its way


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Implements the service of `proto/weir/v1/inference_service.proto`."""

    def __init__(
        self,
        registry: RequestRegistry,
        authenticator: Authenticator,
        sessions: Sessions,
        reports: Reports,
        *,
        for_peers: bool = False,
    ) -> None:
        """With `for_peers`, only other api processes are served, for requests that run here."""
        self._registry = registry
        self._authenticator = authenticator
        self._sessions = sessions
        self._reports = reports
        self._for_peers = for_peers
        settings = registry.settings
        self._open_streams = OpenStreams(settings.connections.streams_max)
        self._key_check_s = settings.access.stream_key_check_s

    def open_streams(self) -> int:
        """Number of open `Generate` calls."""
        return self._open_streams.open_count

    async def Generate(  # type: ignore[override]  # the stubs know only generators, grpc.aio also takes writers
        self, requests: AsyncIterator[pb.GenerateRequest], context: Context
    ) -> None:
        """Run any number of requests on one stream."""
        opened_at = time.monotonic()
        try:
            permit = self._open_streams.take(context.peer())
        except Overloaded:
            # A client refused while it still writes would see a broken stream instead of the
            # reason.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_MESSAGE_WAIT_S):
                    await anext(aiter(requests), None)
            raise
        with permit:
            secret, trace = bearer_token(context), trace_of_metadata(context.invocation_metadata())
            if self._for_peers:
                origin = await self._vouched_origin(context, secret)
            else:
                origin = self._authenticator.proxies.origin(
                    context.peer(), metadata_values(context, FORWARDED_FOR)
                )
            look_up = partial(
                self._authenticator.principal_of, secret, method=METHOD.get(), origin=origin
            )
            # The process that relays to this one has checked the call for the first time.
            principal = await look_up(again=self._for_peers)
            auth_ms = (time.monotonic() - opened_at) * 1000
            with self._authenticator.stream_keys.hold(
                StreamKey(principal, partial(look_up, again=True), self._key_check_s)
            ) as key:
                stream = ClientStream(
                    self._registry,
                    key,
                    auth_ms,
                    secret=secret,
                    is_relayed=self._for_peers,
                    trace=trace,
                )
                await stream.serve(requests, context)

    async def _vouched_origin(self, context: Context, secret: str) -> Origin:
        """Verify the client address that another process has signed for a relayed call.

        The address is None without a valid signature. Raises the errors of `principal_of`, except
        for the address: without a valid key, nothing is looked up.
        """
        unknown = Origin(context.peer(), None)
        voucher = next(iter(metadata_values(context, VOUCHER)), "")
        if (process_id := voucher_of(voucher)) is None:
            return unknown
        with contextlib.suppress(AddressNotAllowed):
            await self._authenticator.principal_of(
                secret, method=METHOD.get(), origin=unknown, again=True
            )
        async with self._sessions() as session:
            certificate = await certificate_of(session, process_id)
        return Origin(context.peer(), vouched_address(voucher, secret, certificate, time.time()))

    async def _read(
        self, principal: Principal, request: Request, parse: Callable[[Request], Parsed]
    ) -> Parsed:
        """Parse a message when the rate limit of its key permits, in a thread if it is costly.

        Raises: PreparationLimit, Overloaded, and the errors of `parse`.
        """
        await self._registry.share_to_read(principal, size := request.ByteSize())
        if IS_COSTLY.get():
            return await self._registry.in_thread(principal, size, partial(parse, request))
        with self._registry.pace.charging(principal):
            return parse(request)

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Context
    ) -> pb.CountTokensResponse:
        """Count the tokens of a prompt, without running it."""
        principal = await self._authenticator.principal(context)
        parsed = await self._read(principal, request, parse_count_tokens)
        return await count_tokens(self._registry, principal, request, parsed)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """List the models that the caller may use, with the prices that it pays."""
        principal = await self._authenticator.principal(context)
        return pb.ListModelsResponse(
            models=await models_for(self._registry.router, self._sessions, principal)
        )

    async def GetQuota(self, request: pb.GetQuotaRequest, context: Context) -> pb.GetQuotaResponse:
        """List the quotas that apply to the caller, and the restrictions of its key."""
        principal = await self._authenticator.principal(context)
        model = self._registry.router.canonical_name(request.model)
        if model:
            check_model(principal, model)
            self._registry.router.find(model)
        wrong = Violations()
        wire.check_usage_subjects(request, wrong)
        wrong.raise_if_any()
        self._registry.check_kept(
            principal.region, end_user=request.end_user, labels=request.labels
        )
        scopes = (principal.organization_id, principal.project_id)
        subject_ids = (*scopes, principal.api_key_id)
        async with self._sessions() as session:
            states = await quotas_for(session, subject_ids=subject_ids, model=model or None)
            states += await member_quotas_for(
                session,
                organization_id=principal.organization_id,
                scopes=scopes,
                model=model or None,
                end_user=own_end_user(principal, request.end_user),
                labels=request.labels,
            )
            change = await latest_key_change(session, principal.api_key_id)
        return pb.GetQuotaResponse(
            quotas=effective_quota_statuses(states), restrictions=restrictions(principal, change)
        )

    async def Quote(self, request: pb.QuoteRequest, context: Context) -> pb.QuoteResponse:
        """Quote the cost of a request, and whether it would be admitted, without running it."""
        principal = await self._authenticator.principal(context)
        if request.HasField("embed"):
            if request.HasField("start"):
                raise InvalidRequest([FieldViolation("embed", "must not be set beside start")])
            embed = await self._read(principal, request, parse_quoted_embed)
            embed = on_behalf(principal.token, embed)
            return await quote_embed(self._registry, self._sessions, principal, embed)
        parse = partial(parse_quoted_start, window_tokens_max=self._registry.window_tokens_max)
        start = await self._read(principal, request, parse)
        start = on_behalf(principal.token, start)
        return await quote(self._registry, self._sessions, principal, start)

    async def GetGeneration(
        self, request: pb.GetGenerationRequest, context: Context
    ) -> pb.GetGenerationResponse:
        """Look up the record of one request of the caller's project."""
        principal = await self._authenticator.principal(context)
        request_id = wire.parse_request_id(request.request_id)
        async with self._sessions() as session:
            generation = await find_generation(session, principal.project_id, request_id)
            if not principal.knows(generation.end_user):
                raise await request_not_found(session, str(request_id))
        return pb.GetGenerationResponse(generation=generation)

    async def GetOwnUsage(
        self, request: usage_pb.GetOwnUsageRequest, context: Context
    ) -> usage_pb.GetOwnUsageResponse:
        """Report usage and cost of the caller's key, or of its project.

        Raises: Unauthenticated, PermissionDenied for the project with a key of some models,
        InvalidValue for a month, day or grouping.
        """
        principal = await self._authenticator.principal(context)
        if request.project and principal.token is not None:
            raise PermissionDenied(
                "Your token sees only usage of its own key. Ask without `project`, or use an API"
                " key."
            )
        if request.project and principal.models:
            raise PermissionDenied(
                f"Your API key is limited to {', '.join(sorted(principal.models))} and sees only"
                " its own usage. Ask without `project`, or use a key without such a limit."
            )
        self._registry.check_kept(
            principal.region, end_user=request.end_user, labels=request.labels
        )
        groups = Groups(groupings(request.group_by), request.label_key)
        async with self._reports.reading(principal) as session:
            today = utc_date(await database_now(session))
            of = UsageFilter(
                period_of(request.month, request.first_day, request.last_day, today),
                principal.organization_id,
                project_id=principal.project_id if request.project else None,
                api_key_id=None if request.project else principal.api_key_id,
                model=request.model,
                end_user_id=await find_end_user_id(
                    session,
                    principal.organization_id,
                    own_end_user(principal, request.end_user),
                ),
                labels=dict(request.labels),
            )
            report = await own_usage(session, of, groups)
        return own_usage_message(report, principal.currency_code)

    async def CreateClientToken(
        self, request: token_pb.CreateClientTokenRequest, context: Context
    ) -> token_pb.CreateClientTokenResponse:
        """Make a token for a browser."""
        principal = await self._authenticator.principal(context)
        router = self._registry.router
        return await create_client_token(router, self._sessions, principal, request)

    async def RevokeClientTokens(
        self, request: token_pb.RevokeClientTokensRequest, context: Context
    ) -> token_pb.RevokeClientTokensResponse:
        """Revoke client tokens of the calling key."""
        principal = await self._authenticator.principal(context)
        return await revoke_client_tokens(self._sessions, principal, request)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Embed texts as vectors, and bill their tokens."""
        received_at, granted_s = time.monotonic(), remaining_s(context)
        principal = await self._authenticator.principal(context)
        auth_ms = (time.monotonic() - received_at) * 1000
        start = await self._read(principal, request, parse_embed)
        check_model(principal, self._registry.router.canonical_name(start.model))
        deadline = None if granted_s is None else received_at + granted_s
        trace = trace_of_metadata(context.invocation_metadata())
        caller = Caller.of(principal, auth_ms, received_at, deadline, trace)
        start = on_behalf(principal.token, start)
        return await LiveEmbedding(caller, start, self._registry).answer()
