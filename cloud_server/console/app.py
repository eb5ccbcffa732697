"""The console's addresses. Code that reads or asks the fleet runs in worker threads, each with a ledger of its own.

    GET  /  /page/…                  the page
    GET  /session   POST /login      whether a token is needed; a cookie for the token
    GET  /events                     the fleet, live: server-sent events
    GET  /rounds/N  /devices/NAME    a round explained; a device
    POST /devices/NAME/answer        a device's answer to samples
    GET  /flash                      what can be flashed in waves, and what is missing for it
    POST /actions/ACTION             pause, resume, revoke, token, flash, stop-flash, resume-update, abort-update
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cloud_server.console import actions, device_view, round_words
from cloud_server.console.guard import Guard, Tokens, name_shown
from cloud_server.console.live import Live
from cloud_server.devices.flash_in_waves import WaveFlash
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import FleetError
from fleet_core.protocol import topics

PAGE = Path(__file__).parent / "page"
MOST_ROUND = 1 << 31
SMALL, LARGE = 4096, 8 << 20
YEAR_S = 365 * 86_400


def app(
    folder: Path, live: Live, token: str | None = None, names: tuple[str, ...] = (), *, secure: bool = False,
    inventory: Path | None = None,
) -> Guard:
    """The console of the fleet in ``folder``. token: needed by every request, or None. names: host names by which it
    may be reached besides addresses and localhost. secure: it is reached over TLS. inventory: of the devices that are
    flashed in waves; None for the one in the folder."""
    tokens, waves = Tokens(token), WaveFlash(folder, inventory)
    live.also = waves.values

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with live.run():
            yield
        await run_in_threadpool(waves.close)

    async def session(request: Request) -> Response:
        return JSONResponse({"open": tokens.allow(request.headers, name_shown(request.scope))})

    async def login(request: Request) -> Response:
        given = (await _json(request, SMALL)).get("token")
        if not isinstance(given, str) or not tokens.is_token(given):
            raise HTTPException(401, "is not this console's token")
        answer = JSONResponse({"open": True})
        answer.set_cookie(tokens.cookie, tokens.session(), max_age=YEAR_S, httponly=True, samesite="strict",
                          secure=secure)
        return answer

    async def events(request: Request) -> Response:
        if live.full:
            raise HTTPException(503, "too many pages are open")
        return StreamingResponse(live.stream(request.headers.get("last-event-id", "")), media_type="text/event-stream")

    async def one_round(request: Request) -> Response:
        number = _number(request.path_params["number"])
        return await _read(folder, lambda fleet, ledger: round_words.explained(ledger, number))

    async def one_device(request: Request) -> Response:
        name = _name(request)
        return await _read(folder, lambda fleet, ledger: device_view.shown(fleet, ledger, name))

    async def answer(request: Request) -> Response:
        name, given = _name(request), await _json(request, LARGE)
        x = await run_in_threadpool(actions.samples_of, folder, given)
        return JSONResponse(await run_in_threadpool(actions.answer, folder, name, x))

    async def act(request: Request) -> Response:
        given = await _json(request, SMALL)
        place = request.client.host if request.client else ""
        by = " at ".join(filter(None, (name_shown(request.scope), place)))
        action = request.path_params["action"]
        if action == "flash":
            text = await run_in_threadpool(actions.flash, folder, waves, given, by)
        elif action == "stop-flash":
            text = await run_in_threadpool(actions.stop_flash, folder, waves, by)
        else:
            text = await run_in_threadpool(actions.do, folder, action, given, by)
        live.look()
        return JSONResponse({"text": text})

    async def flash(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(waves.offer))

    async def page(_: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})

    routes = [
        Route("/", page), Route("/session", session), Route("/login", login, methods=["POST"]),
        Route("/events", events),
        Route("/rounds/{number}", one_round), Route("/devices/{name}", one_device),
        Route("/devices/{name}/answer", answer, methods=["POST"]),
        Route("/flash", flash),
        Route("/actions/{action}", act, methods=["POST"]),
        Mount("/page", _Files(directory=PAGE)),
    ]
    made = Starlette(
        routes=routes, lifespan=lifespan, middleware=[Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={HTTPException: _http_error, FleetError: _fleet_error},
    )
    return Guard(made, tokens, names)


class _Files(StaticFiles):
    """The page's files; a browser asks each time whether they have changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


async def _read(folder: Path, view: Callable[[Fleet, Ledger], dict[str, Any]]) -> Response:
    def read() -> dict[str, Any]:
        fleet = Fleet.load(folder)
        with Ledger(fleet.ledger_path, create=False) as ledger:
            return view(fleet, ledger)

    return JSONResponse(await run_in_threadpool(read))


async def _json(request: Request, limit: int) -> dict[str, Any]:
    """The request's JSON object of at most ``limit`` bytes."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "expected application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise HTTPException(413, f"more than {limit} bytes")
    try:
        given = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "is not JSON") from error
    if not isinstance(given, dict):
        raise HTTPException(400, "expected a JSON object")
    return given


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) >= MOST_ROUND:
        raise HTTPException(404, "is not a round")
    return int(text)


def _name(request: Request) -> str:
    name = str(request.path_params["name"])
    topics.check_name(name, "device")
    return name


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _fleet_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, FleetError)
    return JSONResponse({"error": str(error)[:1000]}, 409)
