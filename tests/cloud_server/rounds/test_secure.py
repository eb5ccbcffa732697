"""Secure aggregation in a whole fleet: the sum is that of the devices' quantized updates, nobody holds a single one,
devices vanish at each step, the aggregator is restarted, and what does not go together is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.commands import server as commands
from cloud_server.ledger.ledger_tables import Round, Update
from cloud_server.rounds.secure_round import SecureRounds
from cloud_server.rounds.server_rule import RuleState
from edge_agent.compute import trained_update
from edge_agent.device.state import DeviceState
from edge_agent.rounds import reports
from edge_agent.rounds.secure_update import SecureUpdates
from fleet_core.algorithms.interface import Update as AlgorithmUpdate
from fleet_core.algorithms.methods.registry import PRODUCT
from fleet_core.base import storage, trees
from fleet_core.base.errors import ConfigError
from fleet_core.board.device_settings import Tls
from fleet_core.codecs.kinds import common_scale
from fleet_core.link.mqtt import MqttLink
from fleet_core.model.encoded_update import encode_update
from fleet_core.privacy.secure_participant import Participant
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Down, Presence
from fleet_core.protocol.secure_messages import REVEALED, Revealed, SecureStep
from tests.support import inprocess
from tests.support.brokers import private_broker
from tests.support.deaths import founded, two_rounds
from tests.support.inprocess import World, config_text, toy, world
from tests.support.stand_ins import BrokerFaults
from tests.support.world_checks import check_duals, settled

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

DEVICES, ROUNDS = 4, 3
ON = "secure_aggregation = true\nrange = 0.5"


def text(method: str = "fedavg", *, privacy: str = ON, rounds: int = ROUNDS, more: str = "", link: str = "",
         fleet: str = "quorum = 0.5\ndeadline_s = 50", hyper: str = "") -> str:
    base = config_text(method, rounds=rounds, devices=DEVICES, fleet=fleet, link=link, hyper=hyper)
    return f"{base}\n{more}\n[privacy]\n{privacy}\n"


def started(folder: Path, method: str = "fedavg", **settings: Any) -> World:
    w = world(folder, text(method, **settings))
    w.start_server()
    for n in range(DEVICES):
        w.start_agent(f"d{n}", toy(n))
    return w


def ended(w: World, rounds: int = ROUNDS) -> World:
    assert w.pump(lambda: w.closed() == rounds and settled(w)), w.lines[-20:]
    return w


def counted(w: World, number: int) -> set[str]:
    return {row.device for row in w.server.ledger.rows(Update, round=number, status="counted")}


def note(w: World, number: int) -> str:
    return str(w.server.ledger.rows(Round, round=number)[0].note)


def phase(w: World, wanted: str, number: int = 1) -> Callable[[], bool]:
    def there() -> bool:
        opened = w.server.open
        return opened is not None and opened.number == number and opened.secure.phase == wanted

    return there


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[tuple[int, str], list[Any]], dict[int, Any]]:
    """((round, device) -> the whole numbers int64 that it masked, each time; round -> the arrays of the sum), which
    fill up while fleets run."""
    masked: dict[tuple[int, str], list[Any]] = {}
    sums: dict[int, Any] = {}
    honest, updates = Participant.mask, SecureRounds.updates

    def seen(self: Participant, boxes: Any, own: Any) -> Any:
        masked.setdefault((self.session.round, self.name), []).append(own.astype(np.int64))
        return honest(self, boxes, own)

    def summed(self: SecureRounds, opened: Any) -> Any:
        made = updates(self, opened)
        sums[opened.number] = storage.flatten(made[0].payload.groups)
        return made

    monkeypatch.setattr(Participant, "mask", seen)
    monkeypatch.setattr(SecureRounds, "updates", summed)
    return masked, sums


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "pfldyn-proto"])
def test_three_rounds_count_the_sum_of_all_and_duals_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    masked, sums = recorded(monkeypatch)
    w = ended(started(tmp_path, method))
    exponent = w.fleet.config.privacy.exponent
    for number in range(1, ROUNDS + 1):
        assert counted(w, number) == {f"d{n}" for n in range(DEVICES)}
        whole = np.concatenate([sums[number][name].reshape(-1) for name in sorted(sums[number])]) / 2.0**exponent
        values = [value for (of, _), several in masked.items() if of == number for value in several]
        assert np.array_equal(whole, sum(values))
        assert np.abs(whole).max() > 0
    for row in w.server.ledger.rows(Update):
        assert (row.samples, row.loss) == (None, None)
    if method == "pfldyn-proto":
        check_duals(w, feedback=True)
    assert w.pump(lambda: w.server.served_round == ROUNDS)
    w.close()


REFUSED = ("fedproto", "local", "pfedhn")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "hyper"), [
    *((name, "head_steps = 1" if name == "fedrep" else "") for name in PRODUCT if name not in REFUSED),
    ("fedavg", "weighted = true"), ("metavers", "weighted = true"), ("fedmeta-maml", 'form = "appendix"'),
])
def test_a_masked_round_leaves_what_the_same_updates_in_the_open_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, hyper: str
) -> None:
    """Each round closes twice: with the sum, and with every device's own update as it was before it was masked. A
    device counts fully from 40 samples on, which two of them do not have."""
    own: dict[tuple[int, str], AlgorithmUpdate] = {}
    encode, closing = encode_update, RuleState.closing
    keep, compared = trained_update.keep, list[int]()

    def kept(home: Any, boot: str, manifest: Any, *arguments: Any, samples: int, **options: Any) -> None:
        def encoded(*given: Any, **named: Any) -> Any:
            made = encode(*given, **named)
            count = min(samples, manifest.up.secure.most_samples)
            own[manifest.round, home.folder.name] = AlgorithmUpdate(home.folder.name, made.update, count)
            return made

        monkeypatch.setattr(trained_update, "encode_update", encoded)
        keep(home, boot, manifest, *arguments, samples=samples, **options)

    def closed(self: RuleState, opened: Any, updates: Any, members: int) -> Any:
        found = closing(self, opened, updates, members)
        plain = [own[opened.number, one.device] for one in updates]
        wanted = closing(self, opened, plain, members)[0].state
        state = found[0].state
        assert len(plain) == DEVICES
        for got, expected in zip(all_arrays(state), all_arrays(wanted), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert state.scalars == pytest.approx(wanted.scalars, rel=1e-5, abs=1e-6)
        assert trees.norm(trees.subtract(state.model, opened.published)) > 0
        compared.append(opened.number)
        return found

    monkeypatch.setattr(trained_update, "keep", kept)
    monkeypatch.setattr(RuleState, "closing", closed)
    privacy = "secure_aggregation = true\nrange = 0.01\nmost_samples = 40"
    w = world(tmp_path, text(method, rounds=2, hyper=hyper, privacy=privacy))
    w.start_server()
    for n, count in enumerate((25, 50, 113, 90)):
        w.start_agent(f"d{n}", toy(n, count))
    ended(w, 2)
    assert compared == [1, 2]
    assert {row.samples for row in w.server.ledger.rows(Update)} == {None}
    w.close()


def all_arrays(state: Any) -> list[Any]:
    several = (state.model, state.served, *(state.memory[role] for role in sorted(state.memory)))
    return [array for params in several for array in storage.flatten(params).values()]


@pytest.mark.slow
def test_an_agent_too_old_to_mask_a_number_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def presence(**values: Any) -> Presence:
        return Presence(**{**values, "numbers": not values["boot"].startswith("d0")})

    monkeypatch.setattr(reports, "Presence", presence)
    wanted = text("metavers", rounds=1).replace(f"min_devices = {DEVICES}", f"min_devices = {DEVICES - 1}")
    w = world(tmp_path, wanted)
    w.start_server()
    for n in range(DEVICES):
        w.start_agent(f"d{n}", toy(n))
    ended(w, 1)
    assert counted(w, 1) == {f"d{n}" for n in range(1, DEVICES)}
    row = w.server.ledger.device("d0")
    assert row.cannot == "cannot mask the numbers beside its updates: its agent is too old"
    w.close()


@pytest.mark.slow
def test_no_single_update_is_on_the_aggregators_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device's update is planted: a ramp of its own. Neither its bytes nor its values as floats are in any file of
    the fleet's folder at any step, or in anything that the aggregator was sent."""
    planted: dict[str, Any] = {}
    honest = common_scale.values_of
    monkeypatch.setattr(
        common_scale, "values_of",
        lambda data: planted.setdefault(str(len(planted)), np.roll(np.arange(len(honest(data))) % 120, len(planted))
                                        .astype(np.int8)),
    )
    w = started(tmp_path, rounds=1)
    arrived: list[bytes] = []
    receive = w.broker.publish

    def publish(*arguments: Any, **keywords: Any) -> Any:
        arrived.extend(part for part in arguments if isinstance(part, bytes))
        return receive(*arguments, **keywords)

    monkeypatch.setattr(w.broker, "publish", publish)
    disk = b""
    for _ in range(2000):
        if w.closed() == 1:
            break
        w.step()
        if w.server.open is not None and w.server.open.secure.phase in ("masked", "unmask"):
            disk += b"".join(p.read_bytes() for p in sorted(w.fleet.folder.rglob("*")) if p.is_file())
    assert w.closed() == 1
    disk += b"".join(p.read_bytes() for p in sorted(w.fleet.folder.rglob("*")) if p.is_file())
    assert len(planted) == DEVICES
    step = 2.0**w.fleet.config.privacy.exponent
    everything = disk + b"".join(arrived)
    assert len(arrived) > 20
    for values in planted.values():
        part = values[:16]
        for known in (part, part.astype("<i2"), part.astype("<i4"), part * np.float32(step), part * np.float64(step)):
            assert known.tobytes() not in everything
    w.close()


def vanish(w: World, monkeypatch: pytest.MonkeyPatch, names: Collection[str], step: str) -> None:
    """Each of ``names`` is killed when it is asked for that step of round 1, before it does anything."""
    asked: set[str] = set()
    answer = SecureUpdates.answer

    def dying(self: SecureUpdates, wanted: SecureStep, pending: Any) -> Any:
        if self._name in names and wanted.step == step and pending.round == 1:
            asked.add(self._name)
            return None
        return answer(self, wanted, pending)

    monkeypatch.setattr(SecureUpdates, "answer", dying)
    assert w.pump(lambda: asked == {*names}), w.lines[-10:]
    for name in names:
        w.kill_agent(name)
    assert w.pump(lambda: w.closed() == 1), w.lines[-10:]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "in_sum"), [("peers", False), ("boxes", False), ("unmask", True)])
def test_a_device_that_vanishes_is_left_out_or_counted_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, in_sum: bool
) -> None:
    """It is asked to share, to send what it has masked, to unmask."""
    w = started(tmp_path, "pfldyn-proto", rounds=2)
    vanish(w, monkeypatch, ["d1"], step)
    assert counted(w, 1) == {"d0", "d2", "d3", *({"d1"} if in_sum else ())}
    assert ("d1" in note(w, 1)) is not in_sum
    w.start_agent("d1")
    ended(w, 2)
    assert len(counted(w, 2)) == DEVICES
    check_duals(w, feedback=True)
    w.close()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["peers", "boxes", "unmask"])
def test_fewer_than_the_threshold_are_not_counted_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    w = started(tmp_path, "pfldyn-proto", rounds=2)
    vanish(w, monkeypatch, ["d1", "d2"], step)
    assert counted(w, 1) == set()
    assert note(w, 1).startswith("not counted: 2 of 4 devices ")
    assert trees.norm(w.server.checkpoint.state.memory["dual"]) == 0
    for name in ("d1", "d2"):
        w.start_agent(name)
    ended(w, 2)
    assert len(counted(w, 2)) == DEVICES
    check_duals(w, feedback=True)
    w.close()
    commands.rounds(w.fleet.folder, explain=True, as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["note"].startswith("not counted: ")
    commands.rounds(w.fleet.folder, explain=True)
    assert "not counted" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("step", ["keys", "shares", "masked", "unmask"])
def test_after_a_restart_of_the_aggregator_the_round_is_finished_or_left_out_as_a_whole(
    tmp_path: Path, step: str
) -> None:
    w = started(tmp_path, "pfldyn-proto", rounds=2)
    assert w.pump(phase(w, step))
    w.kill_server()
    w.start_server()
    ended(w, 2)
    assert len(counted(w, 1)) == (0 if step == "unmask" else DEVICES)
    assert note(w, 1).startswith("not counted: the aggregator was restarted") is (step == "unmask")
    assert len(counted(w, 2)) == DEVICES
    check_duals(w, feedback=True)
    w.close()


def revealed_sums(w: World, faults: BrokerFaults) -> dict[int, set[str]]:
    """Round -> the sums for which a device has revealed shares."""
    found: dict[int, set[str]] = {}
    for _, message in faults.seen:
        place = topics.parse(w.name, message.topic)
        if place is not None and (place.kind, place.part) == ("up", REVEALED):
            found.setdefault(int(place.key), set()).add(messages.decode(Revealed, message.payload).session)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["server", "d1"])
def test_a_death_at_any_act_leaves_whole_sums_of_one_version_of_each_update_and_true_duals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actor: str
) -> None:
    masked, sums = recorded(monkeypatch)
    fleet = founded(tmp_path / "founded", text("pfldyn-proto", rounds=2), DEVICES)
    exponent, everyone = fleet.fleet.config.privacy.exponent, {f"d{n}" for n in range(DEVICES)}

    def check(at: int | None) -> int:
        masked.clear()
        sums.clear()
        w, death, faults, points = two_rounds(fleet, tmp_path / "run", actor, at, DEVICES)
        assert bool(death.where) is (at is not None)
        for number in (1, 2):
            there = counted(w, number)
            if not there:
                assert note(w, number).startswith("not counted: the aggregator was restarted"), death.where
                continue
            assert there >= everyone - ({"d1"} if actor == "d1" else set()), death.where
            versions = {name: {one.tobytes(): one for one in masked[number, name]} for name in there}
            assert all(len(one) == 1 for one in versions.values()), death.where
            whole = np.concatenate([sums[number][name].reshape(-1) for name in sorted(sums[number])]) / 2.0**exponent
            assert np.array_equal(whole, sum(one.popitem()[1] for one in versions.values())), death.where
        assert all(len(one) == 1 for one in revealed_sums(w, faults).values()), death.where
        assert counted(w, 2) == everyone, death.where
        check_duals(w, feedback=True)
        w.close()
        shutil.rmtree(w.folder)
        return points

    points = check(None)
    assert points > 10
    for at in range(1, points + 1):
        check(at)


@pytest.mark.slow
def test_a_device_that_revealed_masks_the_same_update_for_no_other_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dishonest aggregator that is restarted and asks again, as if nothing had been revealed."""
    monkeypatch.setattr(SecureRounds, "interrupted", lambda self, number: False)
    w = started(tmp_path, rounds=1)
    assert w.pump(lambda: DeviceState(tmp_path / "devices" / "d0").revealed() != "")
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: w.logged("d0: this device takes no part in the sum: this update is in a sum already"))
    assert w.closed() == 0
    w.close()


@pytest.mark.slow
def test_a_device_that_is_restarted_sends_what_it_has_masked_and_keeps_its_dual(tmp_path: Path) -> None:
    w = started(tmp_path, "pfldyn-proto", rounds=2)
    pending = tmp_path / "devices" / "d1" / "methods"
    assert w.pump(lambda: any(b'"codec": "masked"' in p.read_bytes()[:20_000].replace(b'\\"', b'"')
                              for p in pending.glob("*/pending.safetensors")))
    w.kill_agent("d1")
    w.start_agent("d1")
    ended(w, 2)
    assert "d1" in counted(w, 1)
    check_duals(w, feedback=True)
    w.close()


@pytest.mark.slow
def test_lost_messages_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: set[tuple[str, str]] = set()
    send = SecureUpdates._send

    def lossy(self: SecureUpdates, number: int, part: str, message: object) -> None:
        if (self._name, part) in lost:
            return send(self, number, part, message)
        lost.add((self._name, part))

    monkeypatch.setattr(SecureUpdates, "_send", lossy)
    w = started(tmp_path, rounds=1)
    ended(w, 1)
    assert len(lost) == 3 * DEVICES
    assert len(counted(w, 1)) == DEVICES
    w.close()


@pytest.mark.slow
def test_a_step_that_nobody_signed_is_not_followed(tmp_path: Path) -> None:
    w = started(tmp_path, rounds=1)
    assert w.pump(phase(w, "keys"))
    forged = Down("secure", 1, device="d0", secure=SecureStep("a" * 32, "unmask", there=("d0",)))
    w.agents["d0"]._on_message(topics.down("t", "d0"), messages.encode(forged))
    ended(w, 1)
    assert len(counted(w, 1)) == DEVICES
    w.close()


@pytest.mark.slow
def test_a_device_without_a_certificate_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = started(tmp_path, rounds=1)
    monkeypatch.setattr(inprocess, "certified", lambda *arguments: Tls())
    w.start_agent("d9", toy(9))
    ended(w, 1)
    assert "no certificate of this fleet" in w.server.ledger.device("d9").cannot
    assert "d9" not in counted(w, 1)
    w.close()


@pytest.mark.slow
def test_local_noise_goes_together_with_it(tmp_path: Path) -> None:
    w = ended(started(tmp_path, rounds=1, privacy=f'{ON}\nmode = "local"\nclip = 0.5\nnoise_multiplier = 0.5'), 1)
    assert len(counted(w, 1)) == DEVICES
    w.close()


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("fedavg", {"more": '[robust]\nrule = "median"'}, "robust rule 'median' looks at single updates"),
        ("fedavg", {"more": '[robust]\nrule = "clip"'}, "robust rule 'clip' looks at single updates"),
        ("fedproto", {}, "a class that a single device has would show that device's samples"),
        ("pfedhn", {}, "needs each device's update"),
        ("local", {}, "sends nothing"),
        ("fedavg", {"hyper": "weighted = true", "privacy": f'{ON}\nmode = "local"'}, "hyper.weighted = false"),
        ("fedmeta-maml", {"hyper": 'form = "appendix"', "privacy": f'{ON}\nmode = "local"'}, "no form that weights"),
        ("fedavg", {"link": 'up = "auto"'}, "not the codec auto"),
        ("fedavg", {"link": 'up = "topk-10"'}, "not the codec topk-10"),
        ("fedavg", {"link": "skip_below = 0.2"}, "skip_below = 0"),
        ("fedavg", {"link": "max_update_norm = 3.0"}, "privacy.range bounds each value"),
        ("fedavg", {"privacy": f'{ON}\nmode = "central"'}, "'central' noise"),
        ("fedavg", {"privacy": f"{ON}\nleast = 5"}, "fewer than privacy.least"),
        ("fedavg", {"privacy": f"{ON}\nneighbours = 3"}, "an even number"),
        ("fedavg", {"privacy": f"{ON}\nthreshold = 0.5"}, "must be above 0.5"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(
    tmp_path: Path, method: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        world(tmp_path, text(method, **settings))


@pytest.mark.slow
def test_three_rounds_over_the_embedded_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_broker(tmp_path / "broker", "amqtt") as broker:
        monkeypatch.setattr(
            inprocess, "LoopbackLink", lambda _, boot, will: MqttLink(broker.url, client_id=boot, will=will)
        )
        w = started(tmp_path, "pfldyn-proto", fleet="quorum = 0.5\ndeadline_s = 1e6")
        assert w.pump(lambda: w.closed() == ROUNDS and settled(w), steps=200_000, tick_s=0.0005), w.lines[-20:]
        for number in range(1, ROUNDS + 1):
            assert len(counted(w, number)) == DEVICES
        check_duals(w, feedback=True)
        w.close()
