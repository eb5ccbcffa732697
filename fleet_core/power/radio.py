"""Joules of bytes sent and received by radio: by a constant of this board, else by the model of Huang et al. 2012.

Huang et al., "A Close Examination of Performance and Power Characteristics of 4G LTE Networks", MobiSys 2012, Table 4:
watts of a transfer = α · rate + base, so its joules = α · bits + base · seconds. The seconds of transfers are not
measured, so the base is left out, and ``absent`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleet_core.base.error_bounds import Spread
from fleet_core.board.profile import Profile
from fleet_core.power.energy_model import STATED

KINDS = ("wifi", "lte", "ethernet")
OTHER_HARDWARE = Spread(0.5, 2.0)
"""A stated bound, a factor of 2: the paper's phone is not this board, and no second source was compared."""
UNKNOWN_LINK = "no constant, because the kind of link is not known: [radio] kind = \"wifi\" in device.toml"
CABLE = "none: the link is no radio"
ROUTES = "proc/net/route"
INTERFACES = "sys/class/net"


@dataclass(frozen=True)
class RadioModel:
    """Joules per byte up and down; None if there is no constant. absent: what the joules lack, or why there are none.
    """

    up_j_per_byte: float | None = None
    down_j_per_byte: float | None = None
    source: str = ""
    absent: str = ""
    spread: Spread = STATED

    def joules(self, up_bytes: float, down_bytes: float) -> float | None:
        if self.up_j_per_byte is None or self.down_j_per_byte is None:
            return None
        return self.up_j_per_byte * up_bytes + self.down_j_per_byte * down_bytes


NO_RADIO = RadioModel()


def _huang(name: str, up: float, down: float, base_mw: float) -> RadioModel:
    """up, down: α in mW per Mbit/s, which are nJ per bit."""
    return RadioModel(
        8e-9 * up, 8e-9 * down, f"{name}, modelled on other hardware (Huang et al. 2012, Table 4)",
        f"without the base power ({base_mw / 1000:.3g} W while it transfers): the time of transfers is not measured",
        OTHER_HARDWARE,
    )


HUANG = {"wifi": _huang("Wi-Fi", 283.17, 137.01, 132.86), "lte": _huang("LTE", 438.39, 51.97, 1288.04)}


def radio_of(kind: str | None, board: Profile | None = None, j_per_byte: float | None = None) -> RadioModel:
    """kind: one of KINDS; None if it is not known. j_per_byte: the user's own constant, which takes precedence over the
    board's cited constant, as that does over Huang's."""
    if kind == "ethernet":
        return RadioModel(absent=CABLE)
    if j_per_byte is not None:
        return RadioModel(j_per_byte, j_per_byte, f"{j_per_byte:g} J/byte (device.toml)")
    if board is not None and board.radio.source and board.radio.j_per_byte is not None:
        return RadioModel(board.radio.j_per_byte, board.radio.j_per_byte, board.radio.source)
    return RadioModel(absent=UNKNOWN_LINK) if kind is None else HUANG[kind]


def kind_of_link(root: Path = Path("/")) -> str | None:
    """The kind of the interface that has the default IPv4 route, from Linux's /proc and /sys; None if there is none."""
    try:
        rows = [line.split() for line in (root / ROUTES).read_text(encoding="ascii").splitlines()[1:]]
    except (OSError, ValueError):
        return None
    name = next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)
    if name is None:
        return None
    interface = root / INTERFACES / name
    if (interface / "wireless").is_dir() or (interface / "phy80211").exists():
        return "wifi"
    return "lte" if name.startswith(("ww", "ppp")) else "ethernet"
