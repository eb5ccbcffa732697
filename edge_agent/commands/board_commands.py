"""Declares ``edge-agent energy`` and ``edge-agent doctor``: what the board draws, and whether it fits its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

energy_app = typer.Typer(help="Watts now, by source.", invoke_without_command=True)

HOME = Annotated[
    Path, typer.Option("--home", envvar="METAFLEET_HOME", help="Folder with device.toml, samples and state.")
]
PROFILE = Annotated[
    str | None, typer.Option("--profile", metavar="NAME|FILE", help="A board in place of device.toml's.")
]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
HERE = Path(".")


@energy_app.callback()
def energy(
    context: typer.Context,
    home: HOME = HERE,
    profile: PROFILE = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=86400, help="How long to read.")] = 5.0,
    as_json: JSON = False,
) -> None:
    """Show watts now, by source (the board's sensor, RAPL, the model), and why a source has no reading."""
    if context.invoked_subcommand is not None:
        return
    from edge_agent.commands import energy as commands

    commands.show(home, profile, seconds, as_json)


@energy_app.command()
def calibrate(
    meter_watts: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="IDLE BUSY", help="A meter's readings at the input: idle, and with all cores busy."),
    ] = None,
    radio: Annotated[
        float | None,
        typer.Option("--radio-j-per-byte", help="Joules of a byte sent or received, above idle: your own figure."),
    ] = None,
    home: HOME = HERE,
) -> None:
    """Write your own meter's figures to device.toml; they replace the profile's."""
    from edge_agent.commands import energy as commands

    if meter_watts is None and radio is None:
        raise typer.BadParameter("give --meter-watts IDLE BUSY, --radio-j-per-byte J, or both")
    if meter_watts is not None:
        commands.calibrate(home, *meter_watts)
    if radio is not None:
        commands.calibrate_radio(home, radio)


def doctor(
    home: HOME = HERE,
    profile: PROFILE = None,
    run: Annotated[bool, typer.Option("--run", help="Also run torch and onnxruntime once, each in a process.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also measure this board's FLOP/s, about ten seconds; kept in its home.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Compare the board with its profile, show what the agent will do, and what is wrong (exit code 1)."""
    from edge_agent.commands import doctor as commands

    commands.doctor(home, profile, run, as_json, measure)
