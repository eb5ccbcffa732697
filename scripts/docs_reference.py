"""The reference pages of the site, read from the code: commands, TOML files, messages, HTTP, Python.

``pages`` is called by make_docs.py when the site is built, so that nothing generated is kept in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import click
import typer

import metafleet
from cloud_server.commands import cli
from cloud_server.commands.help_texts import EXAMPLES
from cloud_server.console import app as console
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.records.fleet_settings import FleetConfig
from cloud_server.records.tariff import Tariff
from edge_agent.commands.arguments import Parser
from edge_agent.commands.cli import parser
from edge_agent.http import inference_protocol
from firmware_profiles.package.device_file import DeviceFile
from firmware_profiles.ssh.inventory import Inventory
from fleet_core.board.device_settings import Settings
from fleet_core.board.profile import Profile
from fleet_core.protocol import device_messages, round_messages, topics

TOML = (
    ("fleet.toml", "the fleet, in its folder; [explained](../docs/fleet.md)", FleetConfig),
    ("device.toml", "a device's settings, in its home", Settings),
    ("DEVICE.toml", "a device to flash; [explained](../docs/flash.md#the-device-file)", DeviceFile),
    ("INVENTORY.toml", "the devices of `metafleet flash --all`", Inventory),
    ("experiment.toml", "what `metafleet simulate` runs; [explained](../docs/laboratory.md)", Experiment),
    ("tariff.toml", "prices, beside fleet.toml; [explained](../docs/costs.md)", Tariff),
    ("BOARD.toml", "a board's profile; [explained](../docs/boards.md#write-one)", Profile),
)
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def pages() -> dict[str, str]:
    """{path in the site: Markdown}."""
    made = {"commands": commands(), "edge-agent": agent_commands(), "toml": toml(), "messages": messages(),
            "http": http(), "python": python()}
    return {f"reference/{name}.md": text for name, text in made.items()}


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [" | ".join(_cell(cell) for cell in row) for row in rows]
    return "\n".join((f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {line} |" for line in lines)))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# Commands -------------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command of ``metafleet``."""
    root: Any = typer.main.get_command(cli.app)
    parts = ["# Commands of metafleet", "What `metafleet COMMAND --help` says. Data goes to stdout, everything else to "
             "stderr. Exit codes: 0 done, 1 failed, 2 a mistake in what was asked."]
    return "\n\n".join((*parts, *_of_group(root, "")))


def _of_group(group: Any, before: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        path = f"{before} {name}".strip()
        if hasattr(command, "commands"):
            yield from _of_group(command, path)
            continue
        yield f"## {path}\n\n{inspect.cleandoc(command.help or '').partition('Example:')[0].strip()}"
        if path in EXAMPLES:
            yield f"```\n{EXAMPLES[path]}\n```"
        context = click.Context(command, info_name=path)
        yield _table(("argument or option", "what it is"), [
            (f"`{_named(one, context)}`", _help(one)) for one in command.params
            if not getattr(one, "hidden", False) and "--help" not in one.opts])


def _named(one: Any, context: click.Context) -> str:
    if one.param_type_name == "option":
        return ", ".join((*one.opts, *one.secondary_opts))
    return str(one.metavar or (one.name or "").upper() or one.make_metavar(context))


def _help(one: Any) -> str:
    said = str(getattr(one, "help", None) or "")
    default = getattr(one, "default", None)
    shown = default not in (None, False, "", ()) and not callable(default)
    return f"{said} Default: {default}." if shown else said


def agent_commands() -> str:
    """Every command of ``edge-agent``."""
    parts = ["# Commands of edge-agent", "What `edge-agent COMMAND --help` says, on a device."]
    return "\n\n".join((*parts, *_of_parser(parser(), "")))


def _of_parser(one: Parser, before: str) -> Iterator[str]:
    for name, command in one.commands.items():
        path = f"{before} {name}".strip()
        if command.commands:
            yield from _of_parser(command, path)
            continue
        yield f"## {path}\n\n{command.description or ''}"
        yield _table(("argument or option", "what it is"), [
            (f"`{', '.join(action.option_strings) or action.metavar or action.dest.upper()}`",
             _expanded(action)) for action in command._actions if action.help != argparse.SUPPRESS
            and "--help" not in action.option_strings])


def _expanded(action: argparse.Action) -> str:
    values = {**vars(action), "prog": "edge-agent"}
    return (action.help or "") % values if "%" in (action.help or "") else action.help or ""


# Dataclasses ----------------------------------------------------------------------------------------------------------


def toml() -> str:
    """Every key of every TOML file."""
    parts = ["# TOML files", "Every table and key, read from the code that checks them. An unknown key is refused, "
             "with the nearest known one."]
    for name, what, kind in TOML:
        parts += [f"## {name}", f"{what[0].upper()}{what[1:]}.", *_tables(kind, "")]
    return "\n\n".join(parts)


def messages() -> str:
    """The topics and every message."""
    drawn = (topics.__doc__ or "").partition("\n\n")[2].rstrip()
    parts = ["# Messages", "JSON over MQTT; how they are used is in [the protocol](../docs/protocol.md). Within a "
             "major version unknown keys are ignored and missing ones take their defaults.", "## Topics",
             f"```text\n{inspect.cleandoc(drawn)}\n```"]
    for module in (round_messages, device_messages):
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__:
                parts += [f"## {kind.__name__}", *_fields_of(kind)]
    return "\n\n".join(parts)


def _tables(kind: type[Any], at: str) -> Iterator[str]:
    """A table's keys, then those of the tables in it."""
    if at:
        yield f"### [{at}]"
    yield from _fields_of(kind)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = next((one for one in _alternatives(hints[field.name]) if dataclasses.is_dataclass(one)), None)
        name = str(field.metadata.get("key", field.name))
        if "variants" in field.metadata:
            for value, one in field.metadata["variants"].items():
                yield f'### [[{name}]] kind = "{value}"'
                yield from _fields_of(one)
        elif isinstance(inner, type):
            yield from _tables(inner, f"{at}.{name}" if at else name)


def _fields_of(kind: type[Any]) -> Iterator[str]:
    about = inspect.cleandoc(kind.__doc__ or "")
    if not about.startswith(f"{kind.__name__}("):
        yield about
    hints = typing.get_type_hints(kind)
    rows: list[tuple[str, ...]] = [
        (f"`{field.metadata.get('key', field.name)}`", _kind(hints[field.name]), _default(field),
         _limits(field.metadata)) for field in dataclasses.fields(kind)]
    yield _table(("key", "is", "default", "limits and meaning"), rows)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """A type without what surrounds it: of ``A | None`` and of lists of A it is A."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union, tuple):
        parts = [part for part in typing.get_args(hint) if part not in (type(None), ...)]
        return tuple(one for part in parts for one in _alternatives(part))
    return (hint,)


def _kind(hint: Any) -> str:
    inner = _alternatives(hint)[0]
    is_table = dataclasses.is_dataclass(inner) or typing.get_origin(inner) is not None
    word = KINDS.get(inner) or ("table" if is_table else "any value")
    several = tuple in (typing.get_origin(hint), *(typing.get_origin(one) for one in typing.get_args(hint)))
    return f"list of {word}s" if several else word


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "**required**"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    if value is None or value in ((), {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _limits(limits: Mapping[str, Any]) -> str:
    said = [str(limits["about"])] if "about" in limits else []
    if "choices" in limits:
        said.append("One of " + ", ".join(f"`{one}`" for one in limits["choices"]) + ".")
    low = f"above {limits['above']}" if "above" in limits else f"at least {limits['min']}" if "min" in limits else ""
    high = f"at most {limits['max']:g}" if "max" in limits else ""
    if low or high:
        said.append(f"{', '.join(filter(None, (low, high))).capitalize()}.")
    if "words" in limits:
        said.append(f"{limits['words']}.")
    elif "pattern" in limits:
        said.append(f"`{limits['pattern']}`")
    return " ".join(said)


# HTTP and Python ------------------------------------------------------------------------------------------------------


def http() -> str:
    """The addresses of a device, of the console and of the metrics."""
    drawn = inspect.cleandoc(console.__doc__ or "").split("\n\n")[1]
    protocol = inspect.cleandoc(inference_protocol.__doc__ or "").partition("\n\n")[2]
    return "\n\n".join((
        "# HTTP", "## A device: edge-agent serve", "Port 8080; [how to use it](../docs/serving.md).", protocol,
        "## The console: metafleet console", "Port 8765; [who may use it](../docs/console.md#who-may-use-it).",
        f"```text\n{inspect.cleandoc(drawn)}\n```",
        "Whatever changes something is a POST with `Content-Type: application/json` and the console's own `Origin`. "
        "Errors are `{\"error\": TEXT}`: 400 and 415 no JSON, 401 no token, 403 another page, 404 no such thing, 409 "
        "refused, with the reason, 413 too long, 421 a foreign host name.",
        "## Metrics", "`GET /metrics` of `metafleet metrics` (port 9464) and of an agent, in Prometheus's text format: "
        "[names and units](../docs/keeping.md).",
    ))


def python() -> str:
    """The functions and classes of ``import metafleet``."""
    parts = ["# Python: metafleet", inspect.cleandoc(metafleet.__doc__ or "").partition("\n\n    import")[0],
             "[How to use it](../docs/python.md). `make api` makes pages of all packages."]
    for name in metafleet.__all__:
        one = getattr(metafleet, name)
        if inspect.isclass(one):
            parts += [f"## {name}", inspect.cleandoc(one.__doc__ or "")]
            for key, member in vars(one).items():
                called = member.fget if isinstance(member, property) else member
                if not key.startswith("_") and inspect.isfunction(called):
                    kind = "" if isinstance(member, property) else _signature(called)
                    parts += [f"### {name}.{key}", f"```python\n{key}{kind}\n```", _docstring(called)]
        elif inspect.isfunction(one):
            parts += [f"## {name}", f"```python\n{name}{_signature(one)}\n```", _docstring(one)]
    return "\n\n".join(filter(None, parts))


def _signature(one: Any) -> str:
    return re.sub(r"'([^']*)'", r"\1", str(inspect.signature(one)).replace("self, ", "").replace("(self)", "()"))


def _docstring(one: Any) -> str:
    """Its arguments as a list."""
    text = inspect.cleandoc(one.__doc__ or "")
    return re.sub(r"^    (\w+): ", r"* `\1`: ", text, flags=re.MULTILINE).replace("Args:\n", "Arguments:\n\n")
