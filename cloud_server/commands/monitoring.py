"""``metafleet console``: the fleet on a page, in a browser."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from cloud_server.devices.devices import FLEET
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError


def console(
    fleet: FLEET,
    host: Annotated[str, typer.Option(help="Address to listen at; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8765,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Ask for the token in this file (mode 0600, "
                                                    "made if missing); default: console.token in the fleet's folder, "
                                                    "beyond loopback.")] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="Serve HTTPS, with --key.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="PEM")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Allow plain HTTP beyond this machine.")] = False,
    name: Annotated[list[str] | None, typer.Option(help="A host name by which browsers reach it; may be repeated.")]
    = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Show the fleet on a page: devices, rounds, learning, cost, log; pause it, revoke a device, try an answer.

    Example: metafleet console greenhouse --open
    """
    try:
        from cloud_server.console import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"'{error.name}' is not installed", hint='pip install "metafleet[console]"') from error

    def ready(url: str) -> None:
        print(url, flush=True)
        processes.say("the console; Ctrl-C ends it, and the fleet runs on")
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # one in a terminal holds it up

    serve.run(fleet, serve.Address(host, port, token_file, certificate, key, plain, tuple(name or ())), ready)
