"""Settings of the door: where a process listens, by which certificate, and what it bears from those who knock.

Every bound that protects the service from its clients stands here with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from api.setting_values import SettingInvalid, address_or_off, listen_address, networks, seconds, setting, share, truth, whole
from metering.tenants.networks import Network, networks_of

OPENAI_PORT_DISTANCE = 1000  # so that servers on neighbouring ports do not meet
METRICS_PORT_DISTANCE = 2000
METRICS_PORTS_TRIED = 64  # by processes that share their port with others, and cannot share this one
PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """What holds before anybody is let in. Durations in seconds, sizes in bytes."""

    listen_address: str = setting("WEIR_LISTEN", "127.0.0.1:8443", listen_address)
    # For OpenAI's clients, over HTTP: host:port, or "off". Empty: this machine alone, 1000 ports above that of WEIR_LISTEN.
    openai_listen: str = setting("WEIR_OPENAI_LISTEN", "", address_or_off)
    # The page for people at /console of the same port. 0 switches it off, the JSON form of its calls with it.
    console: bool = setting("WEIR_CONSOLE", True, truth)
    # For Prometheus, in the clear and without a key: host:port, or "off". Empty: this machine alone, 2000 ports above that of
    # WEIR_LISTEN. A process that shares that port takes the first one from there on that is free.
    metrics_listen: str = setting("WEIR_METRICS_LISTEN", "", address_or_off)
    # Lets several processes of one machine listen on one port; the kernel gives each connection to one of them. Without it a second
    # server on the same port is the mistake that it mostly is.
    share_port: bool = setting("WEIR_SHARE_PORT", False, truth)
    # host:port of the peer port, where the other api processes of the database attach to requests, over mutual TLS. Empty: a free
    # port on the host of WEIR_LISTEN. Name one where a firewall stands between the machines.
    peer_listen_address: str = setting("WEIR_PEER_LISTEN", "", str)
    # "host" or "host:port" where the others find that. Empty: where it listens, by the machine's name if on all addresses.
    advertise_address: str = setting("WEIR_ADVERTISE_ADDRESS", "", str)
    # PEM files; both or none. A renewed certificate counts from the next connection on, without a restart.
    tls_certificate: str = setting("WEIR_TLS_CERTIFICATE", "", str)  # the server's own first, then those between it and its root
    tls_key: str = setting("WEIR_TLS_KEY", "", str)  # not encrypted: nobody is there to type a passphrase
    # PEM file of authorities. If it is given, a client needs a certificate of theirs to be listened to at all, beside its key.
    tls_client_ca: str = setting("WEIR_TLS_CLIENT_CA", "", str)
    # Keys and prompts would travel in the clear: only behind a proxy that speaks TLS, or in a network that nobody else is in.
    allow_plaintext: bool = setting("WEIR_ALLOW_PLAINTEXT", False, truth)

    # Failed authentications that one address (IPv6: one /64) may have at once and per minute. Nobody guesses 256 bits: this keeps
    # a flood of wrong keys from the database. Keys that were good a while ago pass in any case. 0: no bound, for servers behind a
    # proxy, which see one address only.
    auth_failures_per_minute: int = setting("WEIR_AUTH_FAILURES_PER_MINUTE", 60, whole(0, 1_000_000))

    # Networks of the proxies before this server, separated by commas: those alone are believed what `X-Forwarded-For` says of where
    # a call comes from. Empty: nobody is, and a call comes from whoever has connected.
    trusted_proxies: str = setting("WEIR_TRUSTED_PROXIES", "", networks)

    # A stream is open for days, and its key may be changed meanwhile: it is looked at again with the first message after so long.
    # That is for a process that is cut off: the others hear of a change, and of a revocation, at once.
    stream_key_check_s: float = setting("WEIR_STREAM_KEY_CHECK_S", 60.0, seconds(86_400))

    # When keys were used last is written once in so long, for all of them together, and so late it may be told.
    key_use_interval_s: float = setting("WEIR_KEY_USE_INTERVAL_S", 60.0, seconds(3600))

    # 4 MiB hold a prompt of some hundred thousand tokens in any encoding; beyond it parsing alone would stall the others.
    message_bytes_max: int = setting("WEIR_MESSAGE_BYTES_MAX", 4 * 2**20, whole(1024, 2**30))
    # All frames of a message are begun with in one go, and no other stream is served meanwhile. Two for each request that a stream
    # may run: whoever starts more than that learns which one was too many.
    frames_per_message_max: int = setting("WEIR_FRAMES_PER_MESSAGE_MAX", 2000, whole(1, 1_000_000))
    # Share of the event loop's time for the frames and calls of one API key, on all of its streams, after a quarter of a second's
    # worth: beyond it they are read more slowly. All keys of an organization have twice that. Thousands of frames in a second need
    # a tenth of it, and a flood of one key leaves three quarters to others.
    frames_share_max: float = setting("WEIR_FRAMES_SHARE_MAX", 0.25, share)
    # Characters of prompts that are prepared at once, rendered and tokenized, for one API key and for all: two messages of the
    # largest size, and eight. The keys of an organization together take no more than they leave free. A message of a
    # conversation counts as 30 more. While tokenized, a text takes some 30 times its size.
    preparation_chars_per_key_max: int = setting("WEIR_PREPARATION_CHARS_PER_KEY_MAX", 8 * 2**20, whole(1024, 2**40))
    preparation_chars_max: int = setting("WEIR_PREPARATION_CHARS_MAX", 32 * 2**20, whole(1024, 2**40))
    # Threads for that. More than cores only make the event loop wait.
    preparation_thread_count: int = setting("WEIR_PREPARATION_THREADS", 2, whole(1, 64))
    # Of one call, as HPACK counts it. A key, a deadline and a tracing context take a tenth of it.
    metadata_bytes_max: int = setting("WEIR_METADATA_BYTES_MAX", 16 * 2**10, whole(1024, 2**20))
    # Some 40 kB and a check of the key each. One stream carries many requests, so that a client needs few.
    streams_per_connection_max: int = setting("WEIR_STREAMS_PER_CONNECTION_MAX", 1000, whole(1, 100_000))
    # Of gRPC's clients, of some 20 kB each, 50 with TLS. One too many is closed before it is listened to, whoever has the others:
    # how many one address may have is for the firewall, which alone knows whether a thousand customers stand behind it.
    connections_max: int = setting("WEIR_CONNECTIONS_MAX", 10_000, whole(1, 1_000_000))
    # A connection without a call is closed after so long; a client that comes again connects anew and notices nothing.
    connection_idle_max_s: float = setting("WEIR_CONNECTION_IDLE_MAX_S", 1800.0, seconds(86_400))
    # After so long a connection takes no new calls, and the client connects anew: so load finds new servers, and a client
    # certificate is looked at again. Calls that run go on to their end.
    connection_age_max_s: float = setting("WEIR_CONNECTION_AGE_MAX_S", 86_400.0, seconds(31_536_000))
    # HTTP connections of OpenAI's clients, of some 20 kB each; one too many is closed.
    http_connections_max: int = setting("WEIR_HTTP_CONNECTIONS_MAX", 4000, whole(1, 1_000_000))
    # One of them that does not come to a whole head of a request in so long is closed: most load balancers wait a little longer.
    http_idle_max_s: float = setting("WEIR_HTTP_IDLE_MAX_S", 50.0, seconds(3600))
    # TLS and HTTP/2 must have shaken hands by then: whoever connects and says nothing costs a file descriptor.
    handshake_max_s: float = setting("WEIR_HANDSHAKE_MAX_S", 10.0, seconds(3600))

    def openai_address(self) -> tuple[str, int] | None:
        """Host and port for OpenAI's clients; None for no such door. Port 0 lets the system choose, as for gRPC."""
        return self._address(self.openai_listen, OPENAI_PORT_DISTANCE)

    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port for Prometheus, in the same way."""
        return self._address(self.metrics_listen, METRICS_PORT_DISTANCE)

    @property
    def metrics_port_count(self) -> int:
        """Ports from that one on that may be taken."""
        return METRICS_PORTS_TRIED if self.share_port else 1

    def _address(self, given: str, distance: int) -> tuple[str, int] | None:
        """What a setting says; if it says nothing, on the loopback so far above the port for gRPC, or below where there is none."""
        if given == "off":
            return None
        if given:
            host, _, port = given.rpartition(":")
            return host.strip("[]"), int(port)
        port = self.listen_address.rpartition(":")[2]
        if not port.isdecimal():  # a Unix socket: there is no port to go by
            return None
        above = int(port) + distance
        return "127.0.0.1", 0 if port == "0" else above if above <= PORT_MAX else int(port) - distance

    def proxy_networks(self) -> tuple[Network, ...]:
        """Where the proxies are whose word on addresses is taken."""
        return networks_of(tuple(filter(None, self.trusted_proxies.split(","))))

    def tls_files(self) -> tuple[Path, Path, Path | None] | None:
        """Certificate, key and client authorities; None without TLS. Raises: SettingInvalid for a half of it."""
        if not self.tls_certificate and not self.tls_key:
            if self.tls_client_ca:
                raise SettingInvalid("WEIR_TLS_CLIENT_CA: clients show certificates over TLS alone: give WEIR_TLS_CERTIFICATE too")
            return None
        for variable, value in (("WEIR_TLS_CERTIFICATE", self.tls_certificate), ("WEIR_TLS_KEY", self.tls_key)):
            if not value:
                raise SettingInvalid(f"{variable} is not set: a certificate and its key go together")
        return Path(self.tls_certificate), Path(self.tls_key), Path(self.tls_client_ca) if self.tls_client_ca else None
