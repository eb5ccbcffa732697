"""Board profiles as data (one TOML file per board, read by ``fleet_core.board.profile``), and flashing.

Constants in a profile cite their source.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The folder that holds the profiles, ``NAME.toml`` each."""
    return Path(__file__).parent / "boards"
