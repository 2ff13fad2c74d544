"""Construction of the gRPC server: services, limits, health and reflection. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer
from weir.v1 import (
    admin_service_pb2_grpc,
    billing_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    receipt_service_pb2_grpc,
)

from api.access.tls import Tls
from api.admin.admin_service import AdminServicer
from api.admin.billing_service import BillingServicer, ReceiptServicer
from api.core.endpoint import AddressUnavailable
from api.core.health import INFERENCE_SERVICE, SERVICES, Health
from api.core.interceptor import Guard, GuardedServices
from api.core.settings import Settings
from api.generation.request.peers import (
    PEER_KEEPALIVE_MS,
    Identity,
    Peer,
    PeerCertificates,
    advertised,
    peer_listen_address,
)
from api.keda.external_scaler import ExternalScaler
from api.keda.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from api.rpc.inference_service import InferenceServicer
from api.rpc.open_streams import BoundedCalls
from common.settings import SettingInvalid

# The transport resets streams above its own limit without a status if they come before the client
# knows the limit, and delays later ones until others end. It therefore takes more than the service,
# which refuses them with a reason and a retry-after; but not many times more, so that waiting
# refusals hold back the next ones.
REFUSABLE_STREAMS = 500
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
# Detects vanished clients; most load balancers close idle connections after a minute.
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
PEER_CONNECTIONS_MAX = 512  # one per other process; `api/process.py` reserves room for them
KEDA_BYTES_MAX = 64 << 10
KEDA_CALLS_MAX = 1000  # two streams for each ScaledObject, from two operators
# Clients may ping this often, even without a call, as proxies require.
CLIENT_PING_INTERVAL_MS_MIN = 10_000


@dataclass(frozen=True, slots=True)
class Servicers:
    """gRPC services of a process."""

    inference: InferenceServicer
    admin: AdminServicer
    billing: BillingServicer
    receipts: ReceiptServicer


def build_server(
    settings: Settings,
    servicers: Servicers,
    health: Health,
    tls: Tls | None,
    calls: BoundedCalls,
    guard: Guard,
) -> tuple[grpc.aio.Server, int]:
    """Build the server and bind its port, which is returned; port 0 lets the system choose.

    `tls` is None for plaintext. Raises AddressUnavailable if the address cannot be bound.
    """
    server = grpc.aio.server(options=options(settings))
    # The stubs declare a server.
    services: Any = GuardedServices(server, calls, guard)
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicers.inference, services)
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicers.admin, services)
    billing_service_pb2_grpc.add_BillingServiceServicer_to_server(servicers.billing, services)
    receipt_service_pb2_grpc.add_ReceiptServiceServicer_to_server(servicers.receipts, services)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, services)
    described = (
        *SERVICES,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
        REFLECTION_V1,
    )
    add_reflection(ReflectionServicer(described), services)
    try:
        if tls is None:
            port = server.add_insecure_port(settings.listen.address)
        else:
            port = server.add_secure_port(settings.listen.address, tls.grpc_credentials())
    except RuntimeError as error:
        raise AddressUnavailable(
            f"cannot listen on {settings.listen.address}: another program listens there, or this"
            " machine does not have that address; choose another with --listen or WEIR_LISTEN"
        ) from error
    return server, port


def add_reflection(servicer: ReflectionServicer, services: Any) -> None:
    """Serve reflection as v1alpha and v1, whose messages are the same.

    The library has only v1alpha, and newer clients use v1.
    """
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, services)  # type: ignore[no-untyped-call]
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    Default().AddSerializedFile(text_format.Parse(text, FileDescriptorProto()).SerializeToString())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    services.add_registered_method_handlers(REFLECTION_V1, {"ServerReflectionInfo": handler})


def build_peer_server(
    settings: Settings, servicer: InferenceServicer, identity: Identity, accepted: PeerCertificates
) -> tuple[grpc.aio.Server, Peer]:
    """Build the server for other api processes; return it and its address.

    It has one RPC, `Generate`, for `attach` and the frames that follow. `accepted` has the
    certificates of the clients. Raises AddressUnavailable if the address cannot be bound.
    """
    peer_options = {
        "grpc.max_allowed_incoming_connections": min(
            settings.connections.count_max, PEER_CONNECTIONS_MAX
        ),
        "grpc.http2.min_recv_ping_interval_without_data_ms": PEER_KEEPALIVE_MS // 2,
        "grpc.so_reuseport": 0,
    }
    server = grpc.aio.server(options=tuple((dict(options(settings)) | peer_options).items()))
    relay = grpc.stream_stream_rpc_method_handler(
        servicer.Generate,
        inference_service_pb2.GenerateRequest.FromString,
        inference_service_pb2.GenerateResponse.SerializeToString,
    )
    GuardedServices(server, Guard()).add_registered_method_handlers(
        INFERENCE_SERVICE, {"Generate": relay}
    )
    address = peer_listen_address(settings.listen)
    try:
        port = server.add_secure_port(address, accepted.credentials())
    except RuntimeError as error:
        raise AddressUnavailable(
            f"cannot listen on {address} for other api processes: another program listens there, or"
            " this machine does not have that address; choose another with WEIR_PEER_LISTEN"
        ) from error
    return server, Peer(
        advertised(settings.listen.advertised, address, port), identity.certificate.decode()
    )


def build_keda_server(
    settings: Settings, servicer: ExternalScaler
) -> tuple[grpc.aio.Server, int] | None:
    """Build the server of KEDA's external scaler, and bind its port; None if it is off.

    Raises: SettingInvalid, AddressUnavailable.
    """
    listen = settings.listen
    if listen.keda == "off":
        return None
    files, authority = settings.tls.files(), listen.keda_client_ca
    if authority and files is None:
        raise SettingInvalid(
            f"WEIR_KEDA_CLIENT_CA={authority!r}: needs TLS: set WEIR_TLS_CERTIFICATE and"
            " WEIR_TLS_KEY too"
        )
    own = {
        "grpc.max_receive_message_length": KEDA_BYTES_MAX,
        "grpc.max_send_message_length": KEDA_BYTES_MAX,
        "grpc.so_reuseport": int(listen.share_port),
    }
    server = grpc.aio.server(
        options=tuple((dict(options(settings)) | own).items()),
        maximum_concurrent_rpcs=KEDA_CALLS_MAX,
    )
    # The stubs declare a server.
    add_ExternalScalerServicer_to_server(cast(Any, servicer), server)
    try:
        if files is None:
            port = server.add_insecure_port(listen.keda)
        else:
            tls = Tls(files[0], files[1], Path(authority) if authority else None)
            port = server.add_secure_port(listen.keda, tls.grpc_credentials())
    except RuntimeError as error:
        raise AddressUnavailable(
            f"cannot listen on {listen.keda}: another program listens there, or this machine does"
            " not have that address; choose another with WEIR_KEDA_LISTEN"
        ) from error
    return server, port


def options(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Build the gRPC options that limit the transport."""
    return (
        ("grpc.max_receive_message_length", settings.messages.bytes_max),
        # Equal bounds: between different ones the transport would decide at random.
        ("grpc.max_metadata_size", settings.connections.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", settings.connections.metadata_bytes_max),
        ("grpc.max_concurrent_streams", settings.connections.streams_max + REFUSABLE_STREAMS),
        ("grpc.max_allowed_incoming_connections", settings.connections.count_max),
        # A stream buffers at most its initial window of 64 KiB of unread input. Probing would raise
        # that to megabytes on a fast network, for each of thousands of streams. A larger message
        # still fits: the window grows for the message being read.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_connection_idle_ms", milliseconds(settings.connections.idle_max_s)),
        ("grpc.max_connection_age_ms", milliseconds(settings.connections.age_max_s)),
        ("grpc.server_handshake_timeout_ms", milliseconds(settings.connections.handshake_max_s)),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", CLIENT_PING_INTERVAL_MS_MIN),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", int(settings.listen.share_port)),
    )


def milliseconds(seconds: float) -> int:
    """Convert to milliseconds, from 1 to the maximum of gRPC's 32-bit options."""
    return min(max(1, int(seconds * 1000)), 2**31 - 1)
