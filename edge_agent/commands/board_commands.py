"""Declares ``edge-agent energy`` and ``edge-agent doctor``: what the board draws, and whether it fits its profile."""

from __future__ import annotations

from argparse import Namespace

from edge_agent.commands.arguments import Parser, home, json, within


def profile(parser: Parser) -> None:
    parser.add_argument("--profile", metavar="NAME|FILE", help="a board in place of device.toml's")


def declare(root: Parser) -> None:
    """Adds both commands."""
    energy = root.command("energy", "Show watts now, by source (the board's sensor, RAPL, the model), and why a source "
                          "has no reading.", show_energy)
    home(energy)
    profile(energy)
    energy.add_argument("--seconds", metavar="S", type=within(float, 0.1, 86400), default=5.0,
                        help="how long to read; default 5")
    json(energy)
    one = energy.command("calibrate", "Write your own meter's figures to device.toml; they replace the profile's.",
                         calibrate)
    one.add_argument("--meter-watts", metavar=("IDLE", "BUSY"), nargs=2, type=float,
                     help="a meter's readings of the board's input: idle, and with all cores busy")
    one.add_argument("--radio-j-per-byte", metavar="J", type=float,
                     help="joules per byte sent or received, above idle")
    home(one)
    one = root.command("doctor", "Compare the board with its profile, show what the agent will do and what is wrong "
                       "(then exit code 1).", doctor)
    home(one)
    profile(one)
    one.add_argument("--run", action="store_true", help="also run torch and onnxruntime once, each in a process")
    one.add_argument("--measure", action="store_true",
                     help="also measure this board's FLOP/s, about ten seconds; kept in its home")
    json(one)


def show_energy(given: Namespace) -> None:
    from edge_agent.commands import energy

    energy.show(given.home, given.profile, given.seconds, given.as_json)


def calibrate(given: Namespace) -> None:
    from edge_agent.commands import energy
    from fleet_core.base.errors import ConfigError

    if given.meter_watts is None and given.radio_j_per_byte is None:
        raise ConfigError("give --meter-watts IDLE BUSY, --radio-j-per-byte J, or both",
                          where="edge-agent energy calibrate")
    if given.meter_watts is not None:
        energy.calibrate(given.home, *given.meter_watts)
    if given.radio_j_per_byte is not None:
        energy.calibrate_radio(given.home, given.radio_j_per_byte)


def doctor(given: Namespace) -> None:
    from edge_agent.commands import doctor as examining

    examining.doctor(given.home, given.profile, given.run, given.as_json, given.measure)
