"""Every method on a whole fleet in one process equals a plain loop over the same pure functions, bit for bit; it sends
what it declares, every device is evaluated and answers; and methods with state survive deaths and losses."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloud_server.broadcast import manifest
from cloud_server.broadcast.models_down import encode_model
from cloud_server.broadcast.served_model import Audience, encode_served
from cloud_server.choices import method_catalogue
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.ledger.ledger_tables import Evaluation, Update
from cloud_server.records import checkpoint
from cloud_server.records.checkpoint import Checkpoint, Checkpoints
from cloud_server.records.fleet_folder import Fleet, method_of
from cloud_server.records.fleet_settings import FleetConfig
from cloud_server.rounds.update_receiver import REASON
from cloud_server.running.fedavg_baseline import baseline_toml
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.compute.worker import Done, Job
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState
from edge_agent.inference.personalizers import takes_gradient_steps
from edge_agent.inference.service import Service
from fleet_core.algorithms import aggregation, interface
from fleet_core.algorithms.interface import ClientState, Payload, ServerState, read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, storage, trees
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.codecs.kinds.registry import DRAWN
from fleet_core.data.samples import Samples
from fleet_core.learning import local_training, losses, models, personal_model
from fleet_core.link.interface import Message
from fleet_core.link.loopback import LoopbackBroker
from fleet_core.model import graph_bundle, payloads
from fleet_core.personalization.gaussian_process import Processes
from fleet_core.personalization.nearest import Neighbours, softmax
from fleet_core.protocol import messages, round_messages, topics
from fleet_core.protocol.device_messages import Answer
from fleet_core.protocol.round_messages import WHOLE, Manifest, PerDevice, UploadManifest, whole_update
from tests.support.inprocess import CLASSES, World, config_text, toy, without_fsync, world
from tests.support.paths import ROOT
from tests.support.stand_ins import BrokerFaults, FakeDevice, SlowTrainer
from tests.support.waiting import PATIENCE_S
from tests.support.world_checks import finished, opened, settled, state_key, statuses

NAMES = ("d0", "d1", "d2")
ROUNDS = 3
SMALL = {
    "batch": 20, "support_batch": 10, "query_batch": 10, "shots": 3, "query_shots": 5, "finetune_steps": 3,
    "head_steps": 1, "personal_steps": 2, "lr_decay": 0.9, "server_lr": 0.05,
}


@pytest.fixture(autouse=True, scope="module")
def one_machine_that_keeps_its_power() -> Iterator[None]:
    """Nothing waits for the disk; the number of torch threads is reset at the end."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        without_fsync(patch)
        yield
    torch.set_num_threads(before)


def text_of(method: str, codec: str = "int8", *, down: str = "", link: str = "", **options: Any) -> str:
    """fleet.toml with small hyper-parameters."""
    known = METHODS[method].hyper.__dataclass_fields__
    values = {name: value for name, value in SMALL.items() if name in known}
    unread = {problem.key for problem in read_hyper(METHODS[method], values)[1]}
    hyper = "\n".join(f"{name} = {value}" for name, value in values.items() if name not in unread)
    both = f'up = "{codec}"\ndown = "{down or codec}"\n{link}'
    return config_text(method, **{"rounds": ROUNDS, "hyper": hyper, "link": both, **options})


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Make worlds with a running server and three devices, and end them."""
    made: list[World] = []

    def make(method: str, codec: str = "int8", *, broker: LoopbackBroker | None = None, **options: Any) -> World:
        made.append(world(tmp_path / str(len(made)), text_of(method, codec, **options), broker))
        begin(made[-1])
        return made[-1]

    yield make
    for each in made:
        each.close()


def begin(w: World) -> None:
    w.start_server()
    for n, name in enumerate(NAMES):
        w.start_agent(name, toy(n, shift=0.5 * n))


class Plain:
    """What a fleet computes, as a plain loop over the same pure functions."""

    def __init__(self, w: World, names: Collection[str] = NAMES):
        self.fleet, self.method, self.hyper = w.fleet, w.fleet.method, w.fleet.hyper
        self.layout = graph_bundle.unpack(w.fleet.graph_bytes()).layout
        self.wire = self.layout.extended(self.method.down, self.method.shared)
        self.network = models.build(self.layout)
        self.samples = {name: own_samples(w, name) for name in names}
        self.states: dict[str, ClientState] = {name: {} for name in names}
        first = trees.only(w.fleet.first(self.layout), self.method.received)
        self.after = Checkpoint(0, self.method.server.init(trees.widened(first), self.hyper))

    def round(self, lost: Collection[str] = ()) -> None:
        """One round; updates of ``lost`` are not counted."""
        rule, before = self.method.server, self.after
        sent = rule.broadcast(before.state)
        seed = self.fleet.config.fleet.seed
        made = encode_model(sent.groups, before, self.fleet.codec_down, self.wire, self.method.down, seed)
        scalars = self.scalars(before.round + 1)
        broadcast = Payload(made.decoded, {**sent.scalars, **scalars})
        updates = [
            self.device(name, broadcast.beside(self.per_device(before.state, name)))
            for name in aggregation.order(self.samples) if name not in lost
        ]
        as_received = replace(rule.as_received(before.state, trees.widened(made.decoded)), round=before.round + 1)
        state = rule.apply(as_received, updates, len(self.samples), self.hyper)
        self.after = Checkpoint(before.round + 1, state, made.decoded, made.lost)

    def per_device(self, state: ServerState, name: str) -> trees.Params:
        own = self.method.server.per_device(state, name)
        return self.wire.ordered(trees.apply(lambda a: a.astype(np.float32), own))

    def device(self, name: str, broadcast: Payload) -> interface.Update:
        own, state = self.samples[name], dict(self.states[name])
        residual, number = state.pop("residual", None), broadcast.scalars["round"]
        rng = np.random.default_rng((int(broadcast.scalars["seed"]), int(number), zlib.crc32(name.encode())))
        result = local_training.train_round(
            self.method, self.network, self.layout, broadcast, state, own.x, own.y, self.hyper, rng
        )
        groups = self.wire.ordered(result.update.groups)
        sent = payloads.send(self.fleet.codec_up, groups, residual, self.wire, self.method.shared)
        after = dict(result.pending)
        if sent.error is not None:
            after = dict(self.method.client.after_loss(after, sent.error, self.hyper, number))
        if sent.residual is not None:
            after["residual"] = sent.residual
        self.states[name] = after
        return interface.Update(name, Payload(sent.decoded, result.update.scalars), result.samples)

    def scalars(self, number: int) -> dict[str, float]:
        return {"round": float(number), "seed": float(self.fleet.config.fleet.seed)}

    @property
    def served(self) -> trees.Params:
        """The served model as the devices decode it after the last round."""
        codec, seed, size = self.fleet.codec_down, self.fleet.config.fleet.seed, len(NAMES)
        audience = Audience(size, size, size, 0.0)
        return encode_served(self.method, self.after, None, codec, self.wire, seed, audience).weights

    def own_weights(self, own: Samples, state: ClientState | None) -> trees.Params:
        """A device's own weights, if the method's personalizer makes any."""
        return personal_model.adapt(
            self.method, self.network, self.layout, self.served, own.x, own.y, self.hyper, state,
            self.scalars(self.after.round),
        )


def played_plainly(w: World, rounds: int = ROUNDS, lost: Mapping[int, Collection[str]] | None = None) -> Plain:
    plain = Plain(w)
    for number in range(1, rounds + 1):
        plain.round((lost or {}).get(number, ()))
    return plain


def own_samples(w: World, name: str) -> Samples:
    service: Service = w.agents[name].service
    return service.local().own()


def bits(roles: Mapping[str, trees.Params]) -> dict[str, bytes]:
    return {key: np.asarray(array).tobytes() for key, array in storage.flatten_roles(roles).items()}


def state_bits(state: ServerState) -> tuple[dict[str, bytes], dict[str, float]]:
    return bits({"model": state.model, "evaluated": state.served, **state.memory}), dict(state.scalars)


def device_state(w: World, name: str) -> ClientState | None:
    """The committed state on a device's disk."""
    return DeviceState(w.folder / "devices" / name).state(state_key(w, w.server.checkpoint.state.dual_epoch))


def check_same(w: World, plain: Plain) -> None:
    """Aggregator and devices hold what the plain loop ends with, bit for bit."""
    assert state_bits(w.server.checkpoint.state) == state_bits(plain.after.state)
    for name, expected in plain.states.items():
        held = device_state(w, name)
        assert held is not None, name
        assert bits(held) == bits(expected), name


def own_bits(w: World, name: str) -> dict[str, bytes]:
    slots = Slots(DeviceState(w.folder / "devices" / name))
    arrays, _ = storage.unpack(slots.path(slots.pointer().slot, "personal").read_bytes())
    return {key: array.tobytes() for key, array in arrays.items()}


# Every method ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """A fleet after its rounds, with a device ``late`` that never took part and one ``bare`` that has no trainer."""

    w: World
    plain: Plain
    seen: list[tuple[str, Message]]


QUICK = {f"int8 {name}" for name in ("fedavg", "fedmeta-maml", "metavers", "per-fedavg-fo", "pfedme", "pfldyn-proto")}
PLAYS = [f"{codec} {method}" for method in METHODS for codec in ("fp32", "int8")]


@pytest.fixture(
    scope="module",
    params=[pytest.param(play, marks=() if play in QUICK else pytest.mark.slow) for play in PLAYS],
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    codec, method = request.param.split()
    faults = BrokerFaults()
    text = text_of(method, codec, link="chunk_bytes = 1024")
    w = world(tmp_path_factory.mktemp(method), text, LoopbackBroker(faults=faults))
    begin(w)
    assert w.pump(lambda: finished(w) and settled(w))
    plain = played_plainly(w)
    seen = list(faults.seen)
    w.start_agent("late", toy(9), train=False)
    w.start_agent("bare", toy(8), trainer=False)
    assert w.pump(lambda: evaluated_or_unable(w, "late") and evaluated_or_unable(w, "bare"))
    yield Played(w, plain, seen)
    w.close()


def evaluated_or_unable(w: World, name: str) -> bool:
    as_received = any(j.device == name for j in w.server.ledger.rows(Evaluation, round=w.closed()))
    return as_received or w.logged(f"round {w.closed()}: {name}: ")


@pytest.mark.slow
def test_a_live_fleet_computes_what_a_plain_loop_of_the_same_functions_does(played: Played) -> None:
    w, plain = played.w, played.plain
    check_same(w, plain)
    for name in NAMES:
        held = w.agents[name].service.slots.weights()
        assert bits({"served": held.params}) == bits({"served": plain.served})


def bits_of_tree(tree: trees.Params) -> dict[str, bytes]:
    return {key: np.asarray(array).tobytes() for key, array in storage.flatten(tree).items()}


@pytest.mark.slow
def test_something_is_learned_in_every_round_and_by_every_device(played: Played) -> None:
    """Otherwise equal bits would prove little."""
    before, after = Plain(played.w), played.plain
    if after.method.received:
        assert state_bits(before.after.state) != state_bits(after.after.state)
    for role in after.method.client.keeps:
        assert all(trees.norm(state[role]) > 0 for state in after.states.values())
        assert len({str(bits_of_tree(state[role])) for state in after.states.values()}) == len(NAMES), role


def test_every_device_is_evaluated_and_answers_with_what_is_its_own(played: Played) -> None:
    w, method = played.w, played.plain.method
    rows = w.server.ledger.rows(Evaluation, round=ROUNDS, stage="after")
    assert {row.device for row in rows} >= {*NAMES, "late"}
    assert {row.device for row in rows if row.new} <= {"late", "bare"}
    for name in (*NAMES, "late"):
        service = w.agents[name].service
        answer = service.answers(toy(5).x[:4])
        assert (answer.round, answer.personalization, len(answer.labels)) == (ROUNDS, method.personalizer, 4)
        np.testing.assert_allclose(np.sum(answer.probabilities, axis=1), 1, atol=1e-5)
        again = Service(DeviceState(w.folder / "devices" / name), service.stored._data)
        again.restore()
        assert again.answers(toy(5).x[:4]) == answer, "also from the disk alone"


def test_an_answer_is_what_torch_makes_of_the_devices_own_model(played: Played) -> None:
    """Also on a device that never took part, whose own groups begin with first values and are tuned."""
    w, plain, x = played.w, played.plain, toy(5).x[:6]
    for name in (*NAMES, "late"):
        own, state = own_samples(w, name), plain.states.get(name)
        found = w.agents[name].service.predict(x)
        np.testing.assert_allclose(found, expected_answer(plain, own, state, x), atol=1e-5)
        assert np.ptp(found) > 0.05
        if takes_gradient_steps(plain.method, plain.hyper):
            assert own_bits(w, name) == bits_of_tree(plain.own_weights(own, state))
    first = models.initial(plain.layout, plain.fleet.config.fleet.seed)
    for group in plain.method.personal:
        tuned = plain.own_weights(own_samples(w, "late"), None)
        assert trees.norm(trees.subtract(trees.only(tuned, (group,)), trees.only(first, (group,)))) > 0


def expected_answer(plain: Plain, own: Samples, state: ClientState | None, x: Any) -> Any:
    """Probabilities computed with torch from the result of the plain loop."""
    method, network, served = plain.method, plain.network, plain.served
    if method.personalizer == "proto":
        z_own, z = (torch.tensor(local_training.embed(network, served, samples)) for samples in (own.x, x))
        means = losses.prototypes(z_own, torch.tensor(own.y), len(CLASSES))
        return torch.softmax(losses.proto_logits(z, *means, plain.hyper.distance), 1).numpy()
    if method.personalizer == "gp":
        stored, asked = (local_training.embed(network, served, samples) for samples in (own.x, x))
        return Processes.of(stored, own.y, len(CLASSES), plain.hyper).probabilities(asked)
    if method.personalizer == "knn":
        heads = [softmax(local_training.predict_logits(network, served, samples)) for samples in (own.x, x)]
        stored, asked = (local_training.embed(network, served, samples) for samples in (own.x, x))
        near = Neighbours.of(stored, own.y, heads[0], plain.hyper.neighbours, plain.hyper.mixture)
        return near.probabilities(asked, heads[1])
    weights = plain.own_weights(own, state)
    if method.personalizer == "fleet-proto":
        total, count = (torch.tensor(served["prototypes"][name]) for name in ("total", "count"))
        z = torch.tensor(local_training.embed(network, weights, x))
        return torch.softmax(losses.proto_logits(z, total / count[:, None], count), 1).numpy()
    return softmax(local_training.predict_logits(network, weights, x))


def test_a_device_without_torch_answers_as_far_as_it_can_and_says_what_it_cannot(played: Played) -> None:
    w, method = played.w, played.plain.method
    service = w.agents["bare"].service
    said = w.logged(f"bare: {method.name} makes a device's own weights by gradient steps, and there is no trainer here")
    stated = method_catalogue.without_torch(method)
    if stated in ("class means", "embedded samples"):
        assert service.answers(toy(5).x[:4]).personalization == method.personalizer
        assert not said
        return
    assert said
    assert w.logged("pip install \"metafleet[train]\"")
    # the fleets here have no graph of steps
    stated = stated.removeprefix("tuned weights; ").removesuffix(" if its steps cannot become a graph")
    if stated == "the fleet's model":
        assert service.answers(toy(5).x[:4]).personalization == "none"
        assert w.logged("the fleet's model answers as it is")
    else:
        assert stated == "nothing"
        with pytest.raises(
            StateError, match=f"with {method.name} a device answers with weights of its own, which are not made yet"
        ):
            service.predict(toy(5).x[:4])
        assert w.logged(f"round {ROUNDS}: bare: {method.name}"), "the aggregator heard of it"
        assert w.logged("there are no answers")


@pytest.mark.parametrize("method", METHODS)
def test_a_hyper_parameter_that_may_be_none_is_none_by_default(method: str) -> None:
    """A value of None is not sent, and becomes the default again on arrival."""
    hyper = METHODS[method].hyper
    kinds = typing.get_type_hints(hyper)
    for field in fields(hyper):
        if type(None) in typing.get_args(kinds[field.name]):
            assert field.default is None, field.name


WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, onnx=None, onnxscript=None)  # as if they were not installed
from edge_agent.commands.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["knn-per", "metavers", "fedrep", "fedavg"])
def test_the_commands_of_a_device_do_without_torch_what_they_can(fleet, tmp_path, method) -> None:
    w = fleet(method)
    assert w.pump(lambda: finished(w) and settled(w))
    home = w.folder / "devices" / "d0"
    write_device_folder(w.fleet, "d0", home, "mqtt://127.0.0.1:9")
    np.save(tmp_path / "x.npy", toy(5).x[:4])
    wanted = w.agents["d0"].service.answers(toy(5).x[:4])

    def edge_agent(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments), "--home", str(home)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    done = edge_agent("predict", tmp_path / "x.npy", "--json")
    assert messages.decode(Answer, done.stdout.encode()) == wanted, done.stderr
    done = edge_agent("personalize", "--json")
    if METHODS[method].personalizer in ("proto", "knn"):
        assert json.loads(done.stdout)["personalization"] == METHODS[method].personalizer, done.stderr
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert f"error: {method} personalizes by gradient steps" in done.stderr
        assert "hint: 'edge-agent run' takes them" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_the_demos_baseline_takes_over_local_sgd_where_there_is_some(method: str, tmp_path: Path) -> None:
    text = text_of(method, hyper="local_steps = 7\nclient_lr = 0.2").replace("local_steps = 3\n", "")
    live = config.parse(FleetConfig, text, "fleet.toml")
    fleet, hyper = method_of(config.parse(FleetConfig, baseline_toml(live), "baseline.toml"), tmp_path)
    assert fleet.name == "fedavg-meta"
    own = getattr(METHODS[method].hyper(), "server_optimizer", "sgd") == "sgd"
    default = METHODS["fedavg-meta"].hyper()
    assert (hyper.local_steps, hyper.client_lr) == ((7, 0.2) if own else (default.local_steps, default.client_lr))
    assert (hyper.server_optimizer, hyper.server_lr) == ("sgd", 1.0)


# What crosses the wire ------------------------------------------------------------------------------------------------


def crossed(w: World, seen: list[tuple[str, Message]]) -> tuple[dict[int, Manifest], dict[str, bytes], Any]:
    """(open rounds' manifests by number, blobs by id, uploads as (manifest, bytes) by (round, device))."""
    manifests: dict[int, Manifest] = {}
    parts: dict[str, dict[int, bytes]] = {}
    offers: dict[tuple[int, str], UploadManifest] = {}
    chunks: dict[tuple[int, str], dict[int, bytes]] = {}
    for client, message in seen:
        address = topics.parse(w.name, message.topic)
        assert address is not None
        number = topics.number(address.key) or 0
        if address.kind == "cur" and client != w.server.boot:
            manifest = messages.decode(Manifest, message.payload.partition(b"\n")[2], limit=1 << 24)
            if manifest.open:
                manifests[manifest.round] = manifest
        elif address.kind == "b" and client != w.server.boot:
            parts.setdefault(address.key, {})[topics.number(address.part) or 0] = message.payload
        elif address.kind == "up" and address.part == "m":
            offers[number, address.device] = messages.decode(UploadManifest, message.payload)
        elif address.kind == "up" and address.part == WHOLE:
            offers[number, address.device], data = whole_update(message.payload)
            chunks.setdefault((number, address.device), {})[0] = data
        elif address.kind == "up":
            chunks.setdefault((number, address.device), {})[topics.number(address.part) or 0] = message.payload
    blobs = {name: b"".join(found[k] for k in sorted(found)) for name, found in parts.items()}
    uploads = {key: (offers[key], b"".join(found[k] for k in sorted(found))) for key, found in chunks.items()}
    return manifests, blobs, uploads


def values(tree: trees.Params) -> int:
    return sum(int(array.size) for named in tree.values() for array in named.values())


@pytest.mark.slow
def test_what_crosses_the_wire_is_what_the_method_states(played: Played) -> None:
    w, plain = played.w, played.plain
    method, wire, codec = plain.method, plain.wire, plain.fleet.config.link.up
    manifests, blobs, uploads = crossed(w, played.seen)
    one_model = plain.layout.parameters(method.shared)
    alone = plain.layout.parameters(method.per_device)
    besides = wire.parameters(("prototypes",))
    for number in range(1, ROUNDS + 1):
        manifest = manifests[number]
        down = payloads.decode(manifest.model.codec, blobs[manifest.model.blob.id], wire, method.down)
        assert set(down) == set(method.down)
        assert values(down) + alone == method.models_down * one_model + besides
        assert (manifest.per_device is None) is (not method.per_device)
        assert set(manifest.scalars) == {"round", "seed", *method.down_scalars}
        assert manifest.up.codecs == (codec if method.cumulative else "fp32",)
        if manifest.model.codec in DRAWN:
            assert number == 1
        else:
            assert manifest.model.codec == ("fp32" if manifest.model.base is None or not method.cumulative else codec)
        for name in NAMES:
            upload, data = uploads[number, name]
            up = payloads.decode(upload.codec, data, wire, method.shared)
            assert set(up) == set(method.shared)
            assert values(up) == method.models_up * one_model + besides
            if manifest.per_device is not None:
                own = messages.decode(PerDevice, blobs[manifest.per_device.id], limit=1 << 24).of(name)
                assert own is not None
                assert set(payloads.decode("fp32", blobs[own.id], wire, method.per_device)) == set(method.per_device)
            assert set(upload.scalars) == set(method.up_scalars)
            assert (upload.codec, upload.blob.size) == (manifest.up.codecs[0], len(data))
    assert len(uploads) == ROUNDS * len(NAMES)
    each = len(NAMES) * (method.models_down + method.models_up)
    assert [row.models_transmitted for row in w.server.ledger.rounds()] == [float(each)] * ROUNDS


@pytest.mark.parametrize("method", ["pflscaf-proto", "pflscaf-maml", "scaffold"])
def test_control_variates_go_down_and_one_model_comes_up(method: str) -> None:
    """Both papers send two up; the server can compute the change of a device's control itself."""
    row = METHODS[method]
    assert (row.down, row.shared) == ((*row.shared, "control"), row.shared)
    assert (row.models_down, row.models_up, row.paper_models) == (2, 1, (2, 2))


def test_prototypes_travel_in_full_precision_whatever_the_link_says_with_a_log_line(fleet) -> None:
    w = fleet("fedproto", "int8")
    assert w.logged("fedproto sends sums over samples, which a lossy codec would spoil: "
                    "all goes as fp32, not as int8 up")
    assert w.pump(lambda: finished(w))
    (told,) = fleet("fedproto", "fp32").fleet.remarks()
    assert told.startswith("fedproto sends every device's class means")


@pytest.mark.parametrize(("head_steps", "said"), [(4, True), (3, False)])
def test_a_shared_body_that_is_never_trained_is_reported(tmp_path: Path, head_steps: int, said: bool) -> None:
    text = config_text("fedrep", hyper=f"head_steps = {head_steps}").replace("local_steps = 3", "local_steps = 4")
    (tmp_path / "fleet.toml").write_text(text)
    text = "fedrep never trains what is shared: head_steps = 4 of local_steps = 4 move the head alone"
    assert Fleet.load(tmp_path).remarks() == [text] * said


def test_prototypes_of_many_samples_are_no_update_of_a_large_norm(fleet) -> None:
    """They are sums over a device's samples, and the norm limit is per sample."""
    w = fleet("fedproto", rounds=1, link="max_update_norm = 9.0")
    assert w.pump(lambda: finished(w))
    assert statuses(w, 1) == dict.fromkeys(NAMES, "counted")
    total = w.server.checkpoint.state.model["prototypes"]["total"]
    assert trees.norm({"prototypes": {"total": total}}) / len(NAMES) > 9.0
    low = fleet("fedproto", rounds=1, link="max_update_norm = 0.5")
    assert low.pump(lambda: low.server.stalled != "")
    assert low.logged("an update of norm")


def test_a_round_of_a_method_that_shares_nothing_costs_a_few_bytes(fleet) -> None:
    w = fleet("local", "int8", link="chunk_bytes = 1024")
    assert w.pump(lambda: finished(w) and settled(w))
    by_kind = w.server.ledger.totals().payload_by_kind
    nothing = len(payloads.encode("fp32", {}))
    assert by_kind["model"].down == nothing * len(NAMES), "once: it is the same in every round"
    assert by_kind["update"].up == nothing * len(NAMES) * ROUNDS
    assert nothing < 32
    expected = f"a device fetches a model of {nothing} bytes once, and sends as many in each round"
    assert w.logged(f"local shares nothing: {expected}")


@pytest.mark.parametrize(
    ("scalars", "reason"),
    [
        ({}, "scalars [], expected ['margin']"),
        ({"margin": 1.0, "other": 2.0}, "scalars ['margin', 'other'], expected ['margin']"),
        ({"margin": 51.0}, "margin 51, expected at most 50"),
        ({"margin": -51.0}, "margin -51, expected at most 50"),
        ({"x" * 9000: 1.0}, "scalars ['xxxx"),
    ],
)
def test_scalars_that_are_not_the_methods_are_refused_and_named(tmp_path, scalars, reason) -> None:
    w = world(tmp_path, text_of("metavers", "fp32", devices=1, link="max_update_norm = 50.0"))
    w.start_server()
    fake = FakeDevice(w, "liar")
    fake.announce()
    assert w.pump(lambda: opened(w, 1))
    w.step()
    upload = fake.update(b"x" * 3000, scalars=scalars)
    fake.offer(upload, 1)
    w.step()
    (row,) = w.server.ledger.rows(Update)
    assert (row.status, row.reason[: len(reason)]) == ("refused", reason)
    assert len(row.reason) <= REASON
    assert fake.downs()[-1].reason == row.reason
    w.close()


@pytest.mark.slow
def test_a_device_that_joins_when_the_delta_is_the_whole_model_too_takes_it_as_that(fleet) -> None:
    """FedProto starts from zeros: the delta from zeros has the same bytes as the whole model."""
    w = fleet("fedproto", "fp32", rounds=4)
    assert w.pump(lambda: opened(w, 1))
    w.start_agent("d3", toy(3))
    assert w.pump(lambda: opened(w, 2))
    manifest = next(a.manifest for a in w.agents.values() if a.manifest is not None and a.manifest.round == 2)
    assert manifest.model.full == manifest.model.blob
    assert w.pump(lambda: finished(w) and settled(w))
    assert statuses(w, 2) == dict.fromkeys((*NAMES, "d3"), "counted")


# What devices keep, through deaths and losses -------------------------------------------------------------------------

KEEPERS = ("pflscaf-proto", "fedrep", "metavers", "fedmeta-maml", "fedproto", "local", "pfedhn")
"""A control; a personal head; scalars; a server's moments; prototypes; nothing shared; a model for each device."""


def pending_of(w: World, name: str) -> int:
    """The round of the device's pending update; 0 for none."""
    pending = w.agents[name]._updates.pending
    return 0 if pending is None else pending.round


@pytest.mark.slow
@pytest.mark.parametrize("method", KEEPERS)
def test_deaths_in_every_round_change_no_bit(fleet, method) -> None:
    w = fleet(method, rounds=4, fleet="quorum = 1.0")
    for number in (1, 2, 3):
        assert w.pump(lambda n=number: pending_of(w, "d0") == n and opened(w, n))
        w.kill_agent("d0")
        w.kill_server()
        w.start_server()
        w.start_agent("d0")
        assert w.pump(lambda n=number: w.closed() == n, tick_s=0.1)
        w.kill_server()
        w.kill_agent("d1")
        w.start_agent("d1")
        w.start_server()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=0.1)
    check_same(w, played_plainly(w, 4))


@pytest.mark.slow
@pytest.mark.parametrize("method", KEEPERS)
def test_an_update_that_was_not_counted_leaves_its_device_as_it_was(fleet, method) -> None:
    faults = BrokerFaults()
    w = fleet(method, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 5")
    lift = faults.drop("/a/d0/up/2/")
    assert w.pump(lambda: w.closed() == 1 and pending_of(w, "d0") == 2)
    before = device_state(w, "d0")
    assert before is not None
    assert w.pump(lambda: w.closed() == 2 and settled(w), tick_s=0.1)
    assert statuses(w, 2) == dict.fromkeys(("d1", "d2"), "counted")
    after = device_state(w, "d0")
    assert after is not None
    assert bits(after) == bits(before)
    lift()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=0.1)
    check_same(w, played_plainly(w, lost={2: {"d0"}}))


def test_two_devices_with_equal_updates_are_told_apart_in_what_was_counted(fleet) -> None:
    """With a method that shares nothing all updates are equal."""
    w = fleet("local", rounds=1)
    assert w.pump(lambda: finished(w) and settled(w))
    rows = w.server.ledger.rows(Update, round=1)
    assert len({row.update_id for row in rows}) == 1
    (record,) = w.agents["d0"].manifest.counted
    assert record.ids is not None
    assert sorted(record.ids) == sorted(round_messages.mark(1, row.device, row.update_id) for row in rows)
    assert len(set(record.ids)) == len(NAMES)


def test_a_checkpoint_of_before_there_were_scalars_is_read(fleet) -> None:
    w = fleet("fedavg", rounds=1)
    assert w.pump(lambda: finished(w))
    path = next((w.fleet.folder / "state").glob("round-000000001*"))
    arrays, metadata = storage.unpack(path.read_bytes())
    old = {key: value for key, value in metadata.items() if key not in ("scalars", "sha256", "format")}
    checkpoint._write(path, arrays, old)
    layout = w.server.layout
    found = Checkpoints(w.fleet.folder / "state").load(1, w.fleet.first(layout))
    assert state_bits(found.state) == state_bits(w.server.checkpoint.state)


def test_a_fleet_with_rounds_keeps_its_method(fleet) -> None:
    w = fleet("pfldyn-proto", rounds=1)
    assert w.pump(lambda: finished(w))
    w.kill_server()
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace('"pfldyn-proto"', '"pflscaf-proto"').replace("rounds = 1", "rounds = 2"))
    with pytest.raises(ConfigError, match="1 rounds here are pfldyn-proto's") as caught:
        w.start_server()
    assert 'put back method = "pfldyn-proto"' in str(caught.value)
    path.write_text(path.read_text().replace('"pflscaf-proto"', '"pfldyn-proto"'))
    w.start_server()
    assert w.pump(lambda: w.closed() == 2)


def test_what_a_device_keeps_is_as_after_the_round_that_is_evaluated(fleet, monkeypatch) -> None:
    """Also where the list of counted updates comes later than the model, as it always does with this method."""
    monkeypatch.setattr(manifest, "LISTED_IDS", 1)
    faults = BrokerFaults()
    w = fleet("local", broker=LoopbackBroker(faults=faults))
    held: list[str] = []

    def rule(client: str, message: Message) -> list[Message] | None:
        """The list of round 3 reaches d0 last."""
        manifest = w.agents["d0"].manifest
        late = {r.blob.id for r in manifest.counted if r.round == 3 and r.blob} if manifest else set()
        if client != w.agents["d0"].boot or not any(f"/b/{blob}/" in message.topic for blob in late):
            return None
        held.append(message.topic)
        return [] if len(held) == 1 else None

    faults.rules.append(rule)
    assert w.pump(lambda: finished(w) and settled(w), tick_s=0.1)
    assert held
    plain = played_plainly(w)
    for name in NAMES:
        assert own_bits(w, name) == bits_of_tree(plain.own_weights(plain.samples[name], plain.states[name])), name


def test_a_device_answers_with_what_it_had_until_its_own_weights_are_made(fleet) -> None:
    w = fleet("local", rounds=2)
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("serve_every = 2", "serve_every = 1"))
    w.kill_server()
    w.start_server()
    w.trainers["d0"].inner = SlowTrainer()
    service = w.agents["d0"].service
    assert w.pump(lambda: service.answering is not None)
    first = service.answers(toy(5).x[:4])
    assert (first.round, first.personalization) == (1, "own")
    assert w.pump(lambda: (service.round, service.personalization) == (2, "none"))
    assert service.answers(toy(5).x[:4]) == first
    from_disk = Service(DeviceState(w.folder / "devices" / "d0"), service.stored._data)
    from_disk.restore()
    assert from_disk.answers(toy(5).x[:4]) == first
    assert w.pump(lambda: finished(w))
    assert service.answers(toy(5).x[:4]).round == 2


class Dies(InlineTrainer):
    """A trainer whose child dies at its first personalization."""

    died = False

    def submit(self, job: Job) -> None:
        super().submit(job)
        if job.kind == "adapt" and not self.died:
            self.died, self._finished = True, Done(job.kind, {}, error="the trainer process ended with exit code -9")


def test_a_device_whose_trainer_died_while_personalizing_retries_when_it_is_asked_again(fleet) -> None:
    w = fleet("fedper", rounds=2)
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("serve_every = 2", "serve_every = 1"))
    w.kill_server()
    w.start_server()
    w.trainers["d0"].inner = Dies()
    assert w.pump(lambda: w.logged("d0: serve: personalization failed: the trainer process ended with exit code -9"))
    assert w.pump(lambda: w.agents["d0"].service.personalization == "own")
    assert w.pump(lambda: finished(w))
    late = w.start_agent("late", toy(9), train=False)
    w.trainers["late"].inner = Dies()
    assert w.pump(lambda: w.logged("late: serve: personalization failed"))
    w.broker.drop(late.link.client_id)
    assert w.pump(lambda: late.service.personalization == "own"), "also when nothing new is announced"


# Control variates and the fleet that changes --------------------------------------------------------------------------


def check_controls(w: World) -> None:
    """The server's control is the mean of the devices' (and of what error feedback still owes)."""
    state, facts, hyper = w.server.checkpoint.state, w.server.checkpoint.facts, w.server.hyper
    total = trees.zeros_like(state.memory["control"])
    for name in w.server._members.members():
        held = device_state(w, name) or {}
        if "control" in held:
            total = trees.add(total, trees.apply(lambda a: a.astype(np.float64), held["control"]))
        if "residual" in held:
            total = trees.axpy(1 / (hyper.local_steps * hyper.client_lr), held["residual"], total)
    server = trees.scale(state.memory["control"], int(facts["members"]))
    assert trees.norm(trees.subtract(server, total)) <= 3e-6 * max(1.0, trees.norm(total))


@pytest.mark.slow
@pytest.mark.parametrize(("up", "down"), [("fp32", "int8-plain"), ("int8", "int8"), ("int8-plain", "fp32")])
def test_the_servers_control_is_the_mean_of_the_devices_after_every_round(fleet, up, down) -> None:
    faults = BrokerFaults()
    w = fleet("pflscaf-proto", up, down=down, rounds=9, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 20",
              hyper="support_batch = 10\nquery_batch = 10")
    epochs, moved = [], []
    for number in range(1, 10):
        lift = faults.drop("/a/d1/up/3/") if number == 3 else lambda: None
        if number == 2:
            assert w.pump(lambda: opened(w, 2))
            w.start_agent("d3", toy(3, shift=2.0))  # in mid-round
        assert w.pump(lambda n=number: w.closed() >= n and settled(w) and (opened(w, n + 1) or w.server.finished),
                      tick_s=0.25, steps=4000)
        lift()
        epochs.append(w.server.checkpoint.state.dual_epoch)
        moved.append(trees.norm(w.server.checkpoint.state.memory["control"]))
        check_controls(w)
        if number == 4:
            w.server.ledger.request("revoke/d1", "yes")
        if number == 6:
            w.kill_agent("d2")
            w.lose_disk("d2")
            w.start_agent("d2")
    assert min(moved[:4]) > 1e-3, "there is something to compare"
    assert (epochs[:4], sorted(set(epochs))) == ([0] * 4, [0, 1, 2])
    assert "d1" not in statuses(w, 3)
    assert [row.members for row in w.server.ledger.rounds()][1:4] == [4, 4, 4]


def test_a_round_that_is_opened_again_after_a_device_joined_is_the_same_round(fleet) -> None:
    """The newcomer changes the server's control, but must not change what was already sent."""
    faults = BrokerFaults()
    w = fleet("pflscaf-proto", rounds=3, broker=LoopbackBroker(faults=faults), fleet="quorum = 1.0")
    assert w.pump(lambda: w.closed() == 1)
    lift = faults.drop("/a/d0/up/2/")
    assert w.pump(lambda: opened(w, 2) and len(w.server.open.received) == 2)
    announced = w.server.open.model.model
    w.start_agent("d3", toy(3))
    assert w.pump(lambda: w.server.ledger.device("d3") is not None)
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: opened(w, 2), tick_s=0.1)
    assert (w.server.open.model.model, len(w.server.open.received)) == (announced, 2)
    lift()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=0.25)
    assert [row.members for row in w.server.ledger.rounds()] == [3, 4, 4]


@pytest.mark.slow
def test_a_linear_model_has_a_head_alone_and_answers(tmp_path: Path) -> None:
    text = config_text("fedavg", rounds=2, devices=2, hyper="finetune_steps = 2")
    w = world(tmp_path, text.replace('"mlp"', '"logistic"').replace("[model.options]\nhidden = [6]\n", ""))
    w.start_server()
    agents = [w.start_agent(f"d{n}", toy(n), train_fraction=0.6) for n in range(2)]
    assert w.pump(lambda: len(w.server.ledger.rows(Evaluation, round=2, stage="after")) == 2)
    assert {row.stage for row in w.server.ledger.rows(Evaluation, round=2)} == {"before", "after"}
    assert agents[0].service.predict(np.zeros((2, 8), np.float32)).shape == (2, 3)
