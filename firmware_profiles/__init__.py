"""Boards as data files: one TOML file a board, read by ``fleet_core.board.profile``; constants cite their source."""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The folder that holds the profiles, ``NAME.toml`` each."""
    return Path(__file__).parent / "boards"
