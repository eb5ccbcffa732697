"""The ledger's tables of sums over rounds that are no longer kept one by one.

The sums have no round. ``folded_rounds`` says which rounds they cover.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = """
CREATE TABLE folded_rounds (
    status TEXT NOT NULL, privacy TEXT NOT NULL, rounds INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    seconds REAL, models_transmitted REAL, PRIMARY KEY (status, privacy));
CREATE TABLE folded_updates (
    closed INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, status TEXT NOT NULL, updates INTEGER NOT NULL,
    skipped INTEGER NOT NULL, without_energy INTEGER NOT NULL, PRIMARY KEY (closed, device, status));
CREATE TABLE last_counted (
    device TEXT PRIMARY KEY REFERENCES devices, round INTEGER NOT NULL, update_id TEXT NOT NULL);
CREATE TABLE folded_traffic (
    closed INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, kind TEXT NOT NULL, reports INTEGER NOT NULL,
    payload_up INTEGER NOT NULL, payload_down INTEGER NOT NULL, mqtt_up INTEGER NOT NULL, mqtt_down INTEGER NOT NULL,
    mqtt_missing INTEGER NOT NULL, wire_up INTEGER NOT NULL, wire_down INTEGER NOT NULL, wire_missing INTEGER NOT NULL,
    PRIMARY KEY (closed, device, kind));
CREATE TABLE folded_energy (
    closed INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, phase TEXT NOT NULL, source TEXT NOT NULL,
    measured INTEGER NOT NULL, joules REAL NOT NULL, low REAL, high REAL, unknown INTEGER NOT NULL,
    PRIMARY KEY (closed, device, phase, source, measured));
CREATE TABLE folded_flops (
    closed INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, flops REAL NOT NULL,
    PRIMARY KEY (closed, device));
CREATE TABLE folded_usage (
    device TEXT PRIMARY KEY REFERENCES devices, cpu_s REAL, peak_mib REAL, connected_s REAL,
    retransmitted_bytes INTEGER);
CREATE TABLE folded_privacy (
    device TEXT NOT NULL, noise REAL NOT NULL, rounds INTEGER NOT NULL, PRIMARY KEY (device, noise));
"""
"""closed: 1 for a sum over closed rounds; the other sums count only towards the fleet's whole life. ``folded_traffic``:
kind "" is the sum over all kinds, with one report per device and round; the other kinds have one report per device,
kind and round. ``last_counted``: a device's newest counted update among the folded rounds."""

ALL_KINDS = ""


@dataclass(frozen=True, kw_only=True)
class FoldedRounds:
    """The folded rounds, ``first`` to ``last``. closed: how many of them were closed. participants, skipped, refused:
    updates. seconds, models_transmitted: sums over the closed ones that have the figure."""

    first: int
    last: int
    closed: int
    participants: int
    skipped: int
    refused: int
    seconds: float | None = None
    models_transmitted: float | None = None
