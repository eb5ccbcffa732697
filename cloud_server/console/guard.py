"""Who may use the console: checks Host, Origin and token before anything is answered, and sets what the browser allows.

Host: a name that a page elsewhere has pointed at this machine (DNS rebinding) is refused; an address cannot be
redirected like that, so every address is accepted. Origin: requests that change something are accepted from this page
only. Token: needed beyond loopback, as a cookie, which no script can read, or as ``Authorization: Bearer``. An
operator's certificate, shown when TLS begins, replaces the token; any other certificate of the fleet is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from cryptography import x509
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloud_server.broker.mosquitto_config import OPERATORS
from fleet_core.link.bearer_token import shown
from fleet_core.link.host_names import is_ours
from fleet_core.protocol import certificates

POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
}
SHOWN = "metafleet.certificate"
"""In the scope of a request: the verified certificate of its client, DER, or None."""
OPEN = ("/", "/login", "/session")
OPEN_BELOW = "/page/"


class Tokens:
    """The token that opens the console; None on loopback, where no token is needed."""

    def __init__(self, token: str | None):
        self._token = None if token is None else token.encode()
        digest = hashlib.sha256(self._token or b"").hexdigest()
        self.cookie = f"metafleet-{digest[:8]}"  # browsers share cookies between the ports of a host

    @property
    def needed(self) -> bool:
        return self._token is not None

    def is_token(self, text: str) -> bool:
        """Compares in a time that does not depend on the characters."""
        return self._token is not None and hmac.compare_digest(text.encode(), self._token)

    def session(self) -> str:
        """The cookie's value, from which the token cannot be computed."""
        return hmac.new(self._token or b"", b"metafleet console", hashlib.sha256).hexdigest()

    def allow(self, headers: Headers, operator: str = "") -> bool:
        """operator: the name in an operator's certificate that was shown, or empty."""
        if operator or not self.needed:
            return True
        if self._token is not None and shown(headers.get("authorization", ""), self._token.decode()):
            return True
        try:
            held = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return held is not None and hmac.compare_digest(held.value.encode(), self.session().encode())


def name_shown(scope: Scope) -> str:
    """The name in the certificate that the client has shown; empty without one."""
    shown = scope.get(SHOWN)
    return certificates.name_of(x509.load_der_x509_certificate(shown)) if shown else ""


class Guard:
    """The ASGI application ``app`` behind the checks. names: host names by which it may be reached."""

    def __init__(self, app: ASGIApp, tokens: Tokens, names: Iterable[str] = ()):
        self._app, self._tokens = app, tokens
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        answer = self._app
        refused = self._refusal(scope, Headers(scope=scope))
        if refused is not None:
            answer = JSONResponse({"error": refused[1]}, refused[0])

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await answer(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """(status, reason), or None."""
        hosts, path, name = headers.getlist("host"), scope["path"], name_shown(scope)
        if len(hosts) != 1 or not is_ours(hosts[0], self._names):
            return 421, "this console has another host name; metafleet console --name NAME adds one"
        if name and name not in OPERATORS:
            return 403, f"the certificate of '{name[:64]}' is not an operator's: use one of operators/"
        if scope["method"] not in ("GET", "HEAD") and headers.getlist("origin") != [f"{scope['scheme']}://{hosts[0]}"]:
            return 403, "requests that change something must come from the console's own page"
        if not (path in OPEN or path.startswith(OPEN_BELOW) or self._tokens.allow(headers, name)):
            return 401, "the console's token is needed"
        return None
