"""The fleet in a browser and in other programs, and what was done to it: ``metafleet console``, ``metrics``,
``home-assistant`` and ``audit``."""

from __future__ import annotations

import re
import threading
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from cloud_server.devices.devices import FLEET, JSON, PLAIN, checked_url
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, installed
from fleet_core.base.processes import typed


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
    name: Annotated[list[str] | None, typer.Option(help="A host name by which browsers reach the console; may be "
                                                        "repeated.")]
    = None,
    inventory: Annotated[Path | None, typer.Option(metavar="INVENTORY.toml", help="The devices that the page may flash "
                                                   "in waves; default: inventory.toml in the fleet's folder.")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the fleet on a page: devices, rounds, learning, cost, log; pause it, revoke a device, try an answer.

    Example: metafleet console greenhouse --open
    """
    with installed("console"):
        from cloud_server.console import serve
        from cloud_server.identity import audit_log

    def ready(url: str) -> None:
        print(url, flush=True)
        audit_log.done(fleet, "serve console", text=f"{host}, port {port}" if port else host)
        processes.say("Ctrl-C ends the console; the fleet keeps running")
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # a text browser blocks

    names = tuple(name or ())
    serve.run(fleet, serve.Address(host, port, token_file, certificate, key, plain, names, inventory), ready)


def audit(
    fleet: FLEET,
    since: Annotated[str, typer.Option(metavar="HASH", help="List the lines after the one with this hash, and check "
                                       "that it is still there: the hash that this command printed last time, or its "
                                       "first digits.")] = "",
    most: Annotated[int, typer.Option("--last", min=1, max=100_000, help="How many lines to list.")] = 100,
    as_json: JSON = False,
) -> None:
    """List what operators did and whom the aggregator let in or refused, and check that no line was changed. Exit
    code 1 if one was."""
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet

    found = audit_log.check(Fleet.load(fleet).folder, since=_hash(since), most=most)
    if as_json:
        terminal.show(schema.plain(found))
    else:
        rows = [(terminal.date(entry["at"]), *(_printable(text) for text in (
            ", ".join(filter(None, (str(entry.get("via", audit_log.CONSOLE)), str(entry.get("by", ""))))),
            str(entry.get("action", "")), str(entry.get("device", "")), str(entry.get("outcome", "asked for")),
            str(entry.get("text", ""))))) for entry in found.entries]
        terminal.table(rows, ("at", "by", "action", "device", "outcome", "text"))
        for number in found.torn:
            processes.say(f"line {number} cannot be read: a power cut damaged it, or another program wrote it")
        for number, wrong in found.broken:
            processes.say(f"line {number} {wrong}")
        if found.dropped:
            processes.say(f"{found.dropped} older files were dropped; the first line here is from {found.files[0]}")
        chained = f"{found.unchained} of them from a version without hashes; " if found.unchained else ""
        processes.say(f"{found.lines} lines, {chained}the last has the hash {found.head or 'of nothing'}; keep it on "
                      f"another machine: metafleet audit {typed(fleet)} --since {found.head[:16] or 'HASH'}")
    if found.broken:
        raise typer.Exit(1)


def _hash(text: str) -> str:
    """Raises ConfigError for what no hash begins with."""
    if text and not re.fullmatch("[0-9a-f]{8,64}", text):
        raise ConfigError(f"'{text[:80]}' is not a hash", where="--since", expected="8 to 64 hex digits")
    return text


def _printable(text: str) -> str:
    """``text`` without characters that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def metrics(
    fleet: FLEET,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.")] = 9464,
    host: Annotated[str, typer.Option(help="Address to listen on; everyone who reaches it can read the figures.")]
    = "127.0.0.1",
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Print a dashboard for Grafana instead.")] = False,
) -> None:
    """Serve the fleet's figures to Prometheus until stopped, whether or not the aggregator runs."""
    with installed("monitor"):
        from cloud_server.integrations import prometheus
    from cloud_server.records.fleet_folder import Fleet

    if dashboard:
        return print(prometheus.dashboard(), end="")
    taken, end = prometheus.serve(Fleet.load(fleet), host, port)
    print(f"http://{host}:{taken}/metrics", flush=True)
    with processes.until_signal() as stopped:
        while not stopped():
            time.sleep(0.2)
    end()


def home_assistant(
    fleet: FLEET,
    broker: Annotated[str, typer.Option(envvar="METAFLEET_HOME_ASSISTANT", callback=checked_url, help="Home "
                                        "Assistant's broker, mqtt(s)://host:port or ws(s)://host:port/path.")],
    user: Annotated[str | None, typer.Option(help="User name at that broker.")] = None,
    password_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the user's password.")] = None,
    ca: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate of the authority that signed the broker's "
                                            "certificate.")] = None,
    plain: PLAIN = False,
    prefix: Annotated[str, typer.Option(help="Home Assistant's discovery prefix.")] = "homeassistant",
    every: Annotated[float, typer.Option(min=1, max=86400, help="Seconds between two reads of the ledger.")] = 10.0,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the fleet's devices from Home Assistant, and exit.")]
    = False,
) -> None:
    """Show the fleet's devices in Home Assistant, by MQTT discovery, until stopped, whether or not the aggregator
    runs."""
    from cloud_server.integrations import home_assistant as bridge
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.base import storage
    from fleet_core.link.mqtt import check_plain

    if not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", prefix):
        raise ConfigError(f"'{prefix[:80]}' is not a discovery prefix", where="--prefix", expected="levels of letters, "
                          "digits, '-' or '_'")
    if password_file is not None and user is None:
        raise ConfigError("a password needs a user", where="--password-file", hint="add --user")
    password = None if password_file is None else storage.read_bytes(password_file, limit=4096).decode().strip()
    with processes.until_signal() as stopped:
        bridge.run(
            Fleet.load(fleet), check_plain(broker, plain), prefix=prefix, every_s=every, remove=remove, stopped=stopped,
            say=processes.say, ready=lambda: processes.say("the devices are announced to Home Assistant; Ctrl-C ends "
                                                           "this"),
            username=user, password=password, ca=ca,
        )
