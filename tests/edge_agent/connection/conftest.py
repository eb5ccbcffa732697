"""A fleet with certificates and without a model, and its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from tests.support.pki import fleet_without_model


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return fleet_without_model(tmp_path / "fleet")


@pytest.fixture
def ledger(fleet: Fleet) -> Iterator[Ledger]:
    with Ledger(fleet.ledger_path) as opened:
        yield opened
