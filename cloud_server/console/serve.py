"""Serves the console until a signal: its address, its token, TLS, and the certificates of those who connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cloud_server.console import guard
from cloud_server.console.app import app
from cloud_server.console.live import Live
from cloud_server.identity import fleet_certificates
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, LinkError, StateError
from fleet_core.link.bearer_token import token_in
from fleet_core.link.host_names import is_loopback, of_this_machine

PORT = 8765
TOKEN_FILE = "console.token"
MOST_CONNECTIONS = 256


@dataclass(frozen=True)
class Address:
    """Where the console listens. token_file: None for ``console.token`` in the fleet's folder, needed beyond loopback.
    certificate, key: PEM files for TLS. plain: allow HTTP beyond loopback. names: further host names. inventory: of the
    devices that are flashed in waves; None for ``inventory.toml`` in the fleet's folder."""

    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    plain: bool = False
    names: tuple[str, ...] = ()
    inventory: Path | None = None


def token_of(folder: Path, address: Address) -> str | None:
    """The required token, from ``token_in``; None on loopback unless a file is named."""
    if address.token_file is None and is_loopback(address.host):
        return None
    return token_in(address.token_file or folder / TOKEN_FILE)


def check(address: Address) -> None:
    """Raises ConfigError for half of a certificate, and for plain HTTP beyond this machine unless it is allowed."""
    if (address.certificate is None) != (address.key is None):
        raise ConfigError("--certificate and --key belong together")
    for path in (address.certificate, address.key):
        if path is not None and not path.is_file():
            raise ConfigError("there is no such file", where=str(path))
    if not (is_loopback(address.host) or address.certificate or address.plain):
        raise ConfigError("over plain HTTP beyond this machine, others can read the console's token",
                          where=f"--host {address.host}",
                          hint="--certificate and --key, an SSH tunnel (ssh -L), or --plain in a network you trust")


async def serve(folder: Path, address: Address, say: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. say(url): called once it can be reached. Raises FleetError."""
    check(address)
    with Ledger(Fleet.load(folder).ledger_path, create=False):  # reports a missing or damaged ledger now
        pass
    token, live = token_of(folder, address), Live(folder)
    secure, names = address.certificate is not None, of_this_machine(*address.names)
    authority = _authority(folder) if secure else None
    listening = _socket(address)
    port = listening.getsockname()[1]
    settings = uvicorn.Config(
        app(folder, live, token, names, secure=secure, inventory=address.inventory),
        log_level="warning", access_log=False, lifespan="on",
        server_header=False, ws="none", limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=5,
        ssl_certfile=address.certificate, ssl_keyfile=address.key, http=_WithCertificate,
        ssl_cert_reqs=ssl.CERT_NONE if authority is None else ssl.CERT_OPTIONAL, ssl_ca_certs=authority,
    )
    host = f"[{address.host}]" if ":" in address.host else address.host
    host = names[0] if address.host in ("0.0.0.0", "::") else host
    fragment = "" if token is None else f"#token={token}"
    try:
        await _Server(settings, live, lambda: say(f"http{'s' * secure}://{host}:{port}/{fragment}")).serve([listening])
    finally:
        listening.close()


def _authority(folder: Path) -> Path | None:
    """The authority of the operators' certificates; None for a fleet without certificates."""
    path = folder / "ca.pem"
    if not path.exists():
        return None
    with fleet_certificates.as_operator(Fleet.load(folder), "mqtts://localhost"):  # makes one in operators/
        return path


class _WithCertificate(H11Protocol):
    """Puts the certificate that the client showed, which TLS has verified, into the scope of its requests."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        tls, app = transport.get_extra_info("ssl_object"), self.app
        shown = tls.getpeercert(binary_form=True) if tls is not None else None

        async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, guard.SHOWN: shown}, receive, send)

        self.app = with_certificate


class _Server(uvicorn.Server):
    """Calls ``started`` when it can be reached, and ends the pages' streams before it waits for its connections."""

    def __init__(self, settings: uvicorn.Config, live: Live, ready: Callable[[], None]):
        super().__init__(settings)
        self._live, self._ready = live, ready
        self._stopped: Callable[[], bool] = lambda: False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals, and the end of a parent process, end it as they end Metafleet's other processes."""
        with processes.until_signal() as self._stopped:
            yield

    async def on_tick(self, counter: int) -> bool:
        return self._stopped() or await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._live.close()
        await super().shutdown(sockets)


def _socket(address: Address) -> socket.socket:
    """Raises LinkError if the port is taken or the address is not of this machine."""
    try:
        family, kind, protocol, _, at = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(at)
            made.listen(128)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise LinkError(f"cannot listen: {error.strerror or error}", where=f"{address.host}:{address.port}",
                        hint="choose another --port; 0 takes any free one") from error
    return made


def run(folder: Path, address: Address, say: Callable[[str], None]) -> None:
    """As ``serve``. Raises StateError if the server cannot start."""
    try:
        asyncio.run(serve(folder, address, say))
    except SystemExit as error:  # uvicorn, when the application does not start
        raise StateError("the console did not start") from error
