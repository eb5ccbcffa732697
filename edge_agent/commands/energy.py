"""``edge-agent energy``: reads watts by source, and writes a user's own figures to device.toml."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_agent.device import this_board as boards
from fleet_core.base import config, processes, storage, terminal
from fleet_core.base.errors import ConfigError, PowerError
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.board.profile import Power, Profile
from fleet_core.power import watts_now
from fleet_core.power.watts_now import Readings

PERIOD_S, LEAST_READINGS = 1.0, 5


def show(home: Path, profile: str | None, seconds: float, as_json: bool) -> None:
    """Prints a line a second on stderr, and at the end a table or JSON on stdout. Raises PowerError if no source has a
    reading."""
    found = watts_now.sources(*_board_settings(home, profile))
    tallies, absent = read_all(found, seconds, log=lambda line: None if as_json else processes.say(line))
    if as_json:
        return terminal.show({
            "seconds": seconds, "sources": [_plain(tally) for tally in tallies], "absent": absent,
            "meters": list(found.meters),
        })
    if tallies:
        terminal.table([_row(tally) for tally in tallies], ("source", "", "mean W", "least", "most", "not in it"))
    for name, why in absent.items():
        processes.say(f"{name}: {why}")
    for line in found.meters:
        processes.say(f"a meter here: {line}")
    if not tallies:
        raise PowerError("nothing here measures watts", hint="edge-agent energy calibrate --meter-watts IDLE BUSY")


def read_all(
    found: watts_now.Available, seconds: float, *, log: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Readings], dict[str, str]]:
    """(source -> its readings, source -> why it has none), read every second, and ``LEAST_READINGS`` times however long
    each takes."""
    tallies, absent = [Readings(source) for source in found.sources], dict(found.absent)
    end_s, readings = clock() + seconds, 0
    while readings < LEAST_READINGS or clock() < end_s:
        if readings:
            sleep(min(PERIOD_S, seconds / 4))
        for tally in list(tallies):
            try:
                tally.take(clock())
            except PowerError as error:
                absent[tally.source.name] = str(error)
                tallies.remove(tally)
        readings += 1
        if readings > 1 and tallies:
            log("  ".join(f"{tally.source.name}: {tally.watts[-1]:.2f} W" for tally in tallies))
    for tally in tallies:  # a counter's first reading covers no time
        del tally.at_s[0], tally.watts[0]
    return tallies, absent


def calibrate(home: Path, idle_w: float, busy_w: float) -> None:
    """Writes the user's watts to device.toml and leaves its other lines as they are. Raises ConfigError."""
    if not 0 <= idle_w <= busy_w < 100_000:
        raise ConfigError(f"{idle_w:g} {busy_w:g} are not valid watts", where="--meter-watts",
                          expected="0 ≤ IDLE ≤ BUSY")
    path = _edit(home, "power", {"idle_w": float(idle_w), "busy_w": float(busy_w)})
    print(f"{path}: {idle_w:g} W idle, {busy_w:g} W busy, from your meter, in place of the table's")


def calibrate_radio(home: Path, j_per_byte: float) -> None:
    """As ``calibrate``, for the joules of a byte sent or received. Raises ConfigError."""
    if not 0 <= j_per_byte <= 1:
        raise ConfigError(f"{j_per_byte:g} is not a valid number of joules per byte", where="--radio-j-per-byte",
                          expected="0 to 1")
    path = _edit(home, "radio", {"j_per_byte": float(j_per_byte)})
    print(f"{path}: {j_per_byte:g} J per byte, from your meter, in place of the default for the kind of link")


def _edit(home: Path, table: str, values: dict[str, float]) -> Path:
    """Writes ``values`` to a table of device.toml, and returns its path. Raises ConfigError."""
    settings_of(home)
    path = home / "device.toml"
    text = with_values(config.text_of(path), table, values)
    by_hand = " and ".join(f"{key} = {value:g}" for key, value in values.items())
    failed = ConfigError("cannot be edited automatically", where=str(path),
                         hint=f"write [{table}] {by_hand} there by hand")
    try:
        written = getattr(config.parse(Settings, text, str(path)), table)
    except ConfigError as error:
        raise failed from error
    if any(getattr(written, key) != value for key, value in values.items()):
        raise failed
    storage.write_atomic(path, text.encode(), mode=path.stat().st_mode & 0o777)
    return path


def with_values(text: str, table: str, values: dict[str, float]) -> str:
    """TOML ``text`` with ``values`` in ``[table]``; every other line is unchanged."""
    lines = text.splitlines()
    header = re.compile(rf"\s*\[\s*{table}\s*\]\s*(#.*)?")
    start = next((n for n, line in enumerate(lines) if header.fullmatch(line)), None)
    written = [f"{key} = {value!r}" for key, value in values.items()]
    if start is None:
        return "\n".join([*lines, "", f"[{table}]", *written]) + "\n"
    end = next((n for n, line in enumerate(lines) if n > start and line.lstrip().startswith("[")), len(lines))
    setting = re.compile(rf"\s*(?:{'|'.join(values)})\s*=")
    kept = [line for line in lines[start + 1 : end] if not setting.match(line)]
    return "\n".join([*lines[: start + 1], *written, *kept, *lines[end:]]) + "\n"


def _board_settings(
    home: Path, profile: str | None
) -> tuple[Profile | None, Power | None, tuple[float, float] | None]:
    """(profile, sensor, measured watts) of the device in ``home``; without a device only the named profile."""
    board = None if profile is None else boards.named(profile)
    if not (home / "device.toml").exists():
        return board, None, None
    settings = settings_of(home)
    return board or boards.profile_of(home, settings), boards.sensor_of(settings), boards.watts_of(home, settings)


def _plain(tally: Readings) -> dict[str, Any]:
    source = tally.source
    return {
        "source": source.name, "measured": source.measured, "misses": source.misses or None,
        "watts": {"mean": tally.mean_w, "least": min(tally.watts), "most": max(tally.watts), "last": tally.watts[-1]},
        "rails": dict(tally.rails), "readings": len(tally.watts),
    }


def _row(tally: Readings) -> tuple[str, ...]:
    source = tally.source
    watts = (tally.mean_w, min(tally.watts), max(tally.watts))
    return (source.name, "measured" if source.measured else "modelled", *(f"{value:.2f}" for value in watts),
            source.misses)
