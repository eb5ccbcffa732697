"""``metafleet profiles``: the known boards, each a data file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.figures.formatting import ABSENT
from fleet_core.base import processes, schema, terminal

if TYPE_CHECKING:
    from fleet_core.board.profile import Profile

profiles_app = typer.Typer(help="The known boards.", invoke_without_command=True)

FOLDER = Annotated[
    Path | None,
    typer.Option("--folder", metavar="DIR", help="Folder of your own profiles, NAME.toml each; default: "
                                                 "$METAFLEET_PROFILES."),
]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@profiles_app.callback()
def profiles(context: typer.Context, folder: FOLDER = None, as_json: JSON = False) -> None:
    """List the known boards: architecture, memory, first boot, power sensor, and whether they can train."""
    if context.invoked_subcommand is not None:
        context.obj = folder
        return
    from fleet_core.board import catalogue

    found = catalogue.all_of(folder)
    if as_json:
        return terminal.show([facts(board, catalogue.path_of(name, folder)) for name, board in found.items()])
    terminal.table([_row(board) for board in found.values()],
                   ("name", "board", "architecture", "cores", "memory MiB", "first boot", "sensor", "trains"))
    shipped = catalogue.shipped()
    if shipped is not None:
        processes.say(f"your own: copy {shipped / catalogue.TEMPLATE}.toml into a folder, then: metafleet profiles "
                    "--folder DIR")


@profiles_app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A board, or a file that ends in .toml.")],
    folder: FOLDER = None,
    as_json: JSON = False,
) -> None:
    """Show one board in full: every figure with its source, and which figures are absent."""
    from fleet_core.board import catalogue
    from fleet_core.board import profile as boards

    path = catalogue.path_of(name, folder or context.obj)
    board = boards.load(path)
    if as_json:
        return terminal.show(facts(board, path))
    terminal.table(list(_lines(board)), ("what", "value"))
    for term, why in absent(board).items():
        print(f"absent: {term}: {why}")
    processes.say(f"from {path}")


def facts(board: Profile, path: Path) -> dict[str, Any]:
    """One board as plain JSON. absent: {term of the energy model: why}."""
    return {**schema.plain(board), "absent": absent(board), "file": str(path)}


def absent(board: Profile) -> dict[str, str]:
    """{term of the energy model that is unknown: why}. A power sensor measures computing and radio itself."""
    from fleet_core.power.energy_model import BoardModel

    terms = dict(BoardModel(board).absent_terms)
    if board.power.sensor in ("pmic", "ina3221", "hwmon"):
        return {"idle": "no cited idle watts: a sensor does not separate idle from work"} if "idle" in terms else {}
    return terms


def _row(board: Profile) -> tuple[str, ...]:
    first = " or ".join(dict.fromkeys(image.first_boot for image in board.images))
    return (
        board.name, board.title, board.arch, _text(board.cores), ", ".join(map(str, board.memory_mib)) or ABSENT,
        first or ABSENT, board.power.sensor, _trains(board),
    )


def _trains(board: Profile) -> str:
    if not board.can.train:
        return "no"
    most = board.can.train_parameters
    return "yes" if most is None else f"up to {most} parameters"


def _lines(board: Profile) -> Iterator[tuple[str, str]]:
    """(dotted key, value) of everything that is not empty."""
    for key, value in _flat("", schema.plain(board)):
        if value not in (None, [], {}):
            yield key, _text(value)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _flat(f"{prefix}[{number}]", inner)
    else:
        yield prefix, value


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
