"""A device notices drift in what it answers, reports it, and starts again with a new personalization."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_agent.commands import device_commands
from edge_agent.inference import drift, relearn
from edge_agent.inference.device_api import Device
from edge_agent.inference.service import Service
from fleet_core.data.samples import Samples
from tests.support import homes
from tests.support.inprocess import toy

METHOD = "pfldyn-proto"
LOOSE = "[serve]\nworse_by = 1.0\n"


def device(folder: Path, samples: Samples | None = None) -> Service:
    service = homes.service_with_model(homes.home(folder / "d0", samples or toy(1), toml=LOOSE), METHOD)
    relearn.personalize(service)
    return service


def shifted(number: int = 60) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(toy(7).x[:number] + 20, np.float32)


def test_a_shift_is_noticed_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = device(tmp_path)
    service.answers(toy(7).x[:60])
    assert service.drift.moved_at == 0
    service.answers(shifted())
    moved = service.drift.moved_at
    assert 60 < moved <= 120
    restarted = homes.restored(service.stored.home.folder)
    assert restarted.drift.moved_at == moved
    device_commands.status(service.stored.home.folder, as_json=True)
    said = json.loads(capsys.readouterr().out)["drift"]
    assert said["moved_at"] == moved
    assert said["since"] > 0
    device_commands.status(service.stored.home.folder, as_json=False)
    assert f"noticed after {moved} answers" in capsys.readouterr().out


def test_the_agent_takes_over_what_a_program_on_the_device_has_noticed(tmp_path: Path) -> None:
    agents, said = device(tmp_path), list[str]()
    home = agents.stored.home.folder
    program = Device(home, homes.restored(home))
    for x in shifted():
        program.predict(x)
    assert agents.drift.moved_at == 0
    tried = agents.local().added()
    drift.personalize_again(agents, tried, said.append)
    assert 0 < agents.drift.moved_at <= 60
    agents.local().add(shifted()[:30], [agents.layout.classes[int(k)] for k in toy(7).y[:30]])
    drift.personalize_again(agents, tried, said.append)
    assert any("personalized again, with 30 added samples" in line for line in said)
    drift.personalize_again(agents, agents.local().added(), said.append)
    assert agents.drift.moved_at == 0, "the program's sums belong to the personalization before"


def test_evaluations_are_no_answers(tmp_path: Path) -> None:
    service = device(tmp_path)
    service.predict(shifted())
    service.held_back()
    assert service.drift.moved_at == 0


def test_labels_that_are_added_after_a_shift_personalize_again_and_begin_anew(tmp_path: Path) -> None:
    service, said = device(tmp_path), list[str]()
    service.answers(shifted())
    assert service.drift.moved_at
    assert drift.personalize_again(service, 0, said.append) == 0
    assert said == []
    later = toy(8)
    service.local().add(np.asarray(later.x[:30] + 20, np.float32), [later.classes[k] for k in later.y[:30]]
                        if later.classes else [homes.CLASSES[k] for k in later.y[:30]])
    assert drift.personalize_again(service, 0, said.append) == 30
    assert said == ["drift: personalized again, with 30 added samples, by proto"]
    assert service.drift.moved_at == 0
    assert drift.personalize_again(service, 30, said.append) == 30
    assert len(said) == 1


def test_a_damaged_file_and_a_full_disk_do_not_keep_a_device_from_answering(tmp_path: Path) -> None:
    service = device(tmp_path)
    path = service.stored.home.folder / drift.FILE
    path.write_bytes(b"{}")
    restarted = homes.restored(service.stored.home.folder)
    path.unlink(missing_ok=True)
    path.mkdir()  # cannot be replaced
    restarted.answers(shifted())
    assert restarted.drift.moved_at > 0
    assert drift.read(service.stored.home.folder) is None


def test_a_device_with_too_few_samples_is_not_watched(tmp_path: Path) -> None:
    few = toy(1)
    service = device(tmp_path, few.take(range(20)))
    service.answers(shifted())
    assert service.drift.moved_at == 0
    assert drift.read(service.stored.home.folder) is None
