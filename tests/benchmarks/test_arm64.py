"""A card made by ``metafleet flash``, booted on an emulated Cortex-A53 with 512 MB (no board). The device enrols with
its token, appears over MQTT with TLS, fetches the served model, personalizes it without torch on its recording, and
answers as the same software does on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.arm64 import image, scene
from fleet_core.data.heartbeat import load_heartbeat
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs(*scene.PROGRAMS),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a root file system is made by root"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[scene.Scene]:
    base = ROOT / "build" / "arm64"
    with scene.scene(tmp_path_factory.mktemp("arm64"), base, print) as found:
        yield found


def test_a_flashed_card_becomes_a_device_that_answers_as_this_machine_does(world: scene.Scene) -> None:
    world.found()
    world.flash("raspberry-pi-zero-2-w")
    image.check(world.card)
    world.first_boot()
    assert "systemd.run" not in image.cmdline(world.card), "the first boot ended"
    world.desk()
    world.boot()
    world.until(lambda: world.device().get("state") == "on", 600)
    assert world.devices()[scene.BOARD]["state"] == "on"
    samples = load_heartbeat()
    x = samples.of_client(samples.clients[0]).x[-20:]
    world.until(lambda: world.serves(scene.DESK) and world.serves(scene.BOARD), 300)
    desk, board = (world.answer(name, x) for name in (scene.DESK, scene.BOARD))
    assert (board["round"], board["model"], board["personalization"]) == (2, desk["model"], "proto")
    assert board["labels"] == desk["labels"]
    assert np.abs(np.array(board["probabilities"]) - desk["probabilities"]).max() <= 1e-5
    assert world.on_board("uname -m").strip() == "aarch64"
    assert world.on_board("sudo find /var/lib/metafleet /boot/firmware -name '*.token'") == "", "spent, and erased"
    world.power_off()
    image.check(world.card)
