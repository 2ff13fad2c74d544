"""`Quote` of texts to embed: their tokens, the cost, and whether the call would be let in, without embedding them."""

from __future__ import annotations

import uuid
from dataclasses import replace

from weir.v1 import inference_service_pb2 as pb

from api.access.auth import check_model
from api.access.auth import payer as payer_of
from api.core.messages import input_count_max
from api.embedding.embedding import token_count_of, tokenize_inputs
from api.embedding.embedding_wire import check_against_model, parse_embed
from api.process import Process
from api.requests.key_bounds import check_input_bound
from api.requests.quoting import response
from api.requests.tokenizing import TextJob
from metering.quotas import quoting
from metering.store.db import Sessions
from metering.tenants.tenants import Principal


async def quote_embed(process: Process, sessions: Sessions, principal: Principal, message: pb.EmbedRequest) -> pb.QuoteResponse:
    """Answer one call; its id only says which version it would get. Raises what the same call would, but for quotas."""
    asked = pb.EmbedRequest()
    asked.CopyFrom(message)
    asked.request_id = asked.request_id or str(uuid.uuid4())
    with process.pace.spending(principal):
        start = parse_embed(asked)
    check_model(principal, process.router.own_name(start.model))
    route = process.router.route_encoder(start.model, str(start.request_id))
    start = replace(start, model=route.model)
    check_against_model(start, route.encoder.model, input_count_max(route.encoder.model))
    payer = payer_of(principal)
    window = route.encoder.model.context_window_tokens
    texts, work_s = await tokenize_inputs(start, TextJob(process.text_work, payer, process.tokenizers[route.served], window))
    process.pace.spent(principal, work_s)
    sent = token_count_of(texts)
    check_input_bound(principal.bounds, sent, "inputs")
    async with sessions() as session:
        found = await quoting.quote(
            session,
            payer=payer,
            model=start.model,
            input_token_count=sent,
            first_slice_token_count=0,
            least_slice_token_count=0,
            tier=start.tier,
            embedding=True,
        )
    return response(found, sent, 0, 0)
