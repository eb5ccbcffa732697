"""Private updates in a simulation: a seed's noise comes again, epsilon is in the figures, a limit of it ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run import device_work
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.model.encoded_update import EncodedUpdate, encode_update
from fleet_core.privacy.accountant import Accountant
from tests.support import lab

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

LOCAL = {"mode": "local", "clip": 0.5, "noise_multiplier": 4.0}


def asked(path: Path, privacy: dict[str, Any], name: str = "pfldyn-proto", **more: Any) -> experiments.Experiment:
    hyper = None if name == "pfldyn-proto" else {"local_steps": 3}
    return lab.experiment(lab.recordings(path / "toy.npz"), name, hyper, privacy=privacy, **more)


@pytest.mark.parametrize(("mode", "method"), [("local", "pfldyn-proto"), ("central", "fedavg")])
def test_a_seed_gives_the_same_run_again_and_noise_another_than_none(tmp_path: Path, mode: str, method: str) -> None:
    wanted = asked(tmp_path, {**LOCAL, "mode": mode}, method)
    one, two = (lab.run_first(wanted, tmp_path / name) for name in ("one", "two"))
    assert lab.server_state(one) == lab.server_state(two)
    clean = lab.run_first(asked(tmp_path, {}, method), tmp_path / "clean")
    assert lab.server_state(one) != lab.server_state(clean)


def test_epsilon_is_of_the_device_that_was_asked_most_and_its_limit_ends_the_run(tmp_path: Path) -> None:
    accountant = Accountant(1e-5)
    store = lab.run_first(asked(tmp_path, LOCAL), tmp_path / "whole")
    told = [row["privacy"] for row in store.rounds()]
    assert [one["epsilon"] for one in told] == [accountant.epsilon({4.0: one["rounds"]}) for one in told]
    assert told[-1]["rounds"] in (3, 4)  # two of three devices in each of four rounds
    limit = accountant.epsilon({4.0: 2})
    ended = lab.run_first(asked(tmp_path, {**LOCAL, "epsilon": limit}), tmp_path / "ended")
    assert 2 <= len(ended.rounds()) < 4
    assert ended.rounds()[-1]["privacy"]["epsilon"] == limit
    assert "accuracy" in ended.rounds()[-1]


@pytest.mark.slow
def test_where_nobody_knows_who_was_drawn_epsilon_is_smaller(tmp_path: Path) -> None:
    central = {**LOCAL, "mode": "central", "noise_multiplier": 8.0}
    known, hidden = (
        lab.run_first(asked(tmp_path, {**central, "amplified": yes}, "fedavg", cohort=1), tmp_path / str(yes))
        for yes in (False, True)
    )
    assert hidden.rounds()[0]["privacy"]["epsilon"] < known.rounds()[0]["privacy"]["epsilon"]
    with pytest.raises(ConfigError, match=r"privacy\.amplified: needs mode = 'central'"):
        asked(tmp_path, {**LOCAL, "amplified": True})
    with pytest.raises(ConfigError, match="moves away from its minimum"):
        asked(tmp_path, central)


def test_a_secure_sum_is_simulated_by_the_values_that_a_fleet_would_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EncodedUpdate] = []
    def seen(codec: str, *given: Any, **more: Any) -> EncodedUpdate:
        assert codec == "common:-7"  # 127 / 128 is the first such range from 0.9 on
        made.append(encode_update(codec, *given, **more))
        return made[-1]

    monkeypatch.setattr(device_work, "encode_update", seen)
    secure = {"secure_aggregation": True, "range": 0.9}
    lab.run_first(asked(tmp_path, secure, codec_up="int8", codec_down="int8"), tmp_path / "run")
    for one in made:
        for array in storage.flatten(one.update.groups).values():
            assert np.array_equal(array * 128, np.rint(array * 128))
            assert np.abs(array).max() <= 127 / 128
    assert any(array.any() for one in made for array in storage.flatten(one.update.groups).values())
    with pytest.raises(ConfigError, match="not the codec fp32"):
        asked(tmp_path, secure, codec_up="fp32")
