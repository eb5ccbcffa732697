"""A device that answers with a bundle's quantized encoder: when it is requested, it embeds everything, and the status
says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import device_commands
from edge_agent.commands.install import install
from edge_agent.compute import adapter
from edge_agent.compute.onnx_session import open_session
from edge_agent.inference import relearn
from edge_agent.inference.service import Service
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import terminal
from fleet_core.base.errors import ConfigError
from fleet_core.board.device_settings import Personalize
from fleet_core.data.samples import save
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import Bundle
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import Neighbours, Prototypes
from fleet_core.protocol import messages
from fleet_core.protocol.device_messages import Answer
from tests.support import homes
from tests.support.bundles import CLASSES, bundle_of, samples, served_params

X = samples(9, 4).x
WAYS = ("proto", "head", "knn")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "run", adapter.handle)


def made(method: str = "pfldyn-proto") -> Bundle:
    return bundle_of(method, int8=True)


def device(folder: Path, method: str = "pfldyn-proto", *, int8: bool = True, toml: str = "") -> Service:
    """A device that installed a bundle with or without a quantized encoder."""
    path = folder / f"{method}-{int8}.bundle"
    device_bundle.write(path, bundle_of(method, int8=int8))
    home = folder / "d1"
    home.mkdir()
    save(home / "samples.npz", samples(60))
    install(path, home, unsigned=True)
    with (home / "device.toml").open("a") as file:
        file.write(toml)
    return homes.restored(home)


def folder_of(service: Service) -> Path:
    return service.slots.folder.parent


def by(service: Service, way: str) -> relearn.Personalized:
    return relearn.personalize(service, Personalize(way, int8=True))


def wanted(way: str, x: Any, labels: Any, at: Any) -> Any:
    """The probabilities with the bundle's own quantized encoder."""
    embed = open_session(made().int8, {}).run
    z, asked = embed(x), embed(at)
    if way == "proto":
        return Prototypes.from_support(lambda found: found, z, labels, 3).probabilities(asked)
    if way == "head":
        return Head.fit(z, labels, 3).probabilities(asked)
    return Neighbours(z, labels, 3, 10, 1.0).votes(asked)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_the_devices_samples_and_those_that_are_requested_are_embedded_by_the_same_graph(
    tmp_path: Path, way: str
) -> None:
    service = device(tmp_path)
    relearn.personalize(service, Personalize(way))
    plain = service.answers(X)
    by(service, way)
    own, found = service.local().own(), service.answers(X)
    np.testing.assert_allclose(service.predict(X), wanted(way, own.x, own.y, X), atol=1e-5)
    assert (plain.graph, found.graph, found.personalization) == ("embed", "embed-int8", way)
    assert homes.restored(folder_of(service)).answers(X) == found
    relearn.personalize(service, Personalize(way))
    assert service.answers(X) == plain, "no embedding of one is taken for the other's"


@pytest.mark.slow
def test_class_means_of_one_encoder_are_not_those_of_the_other(tmp_path: Path) -> None:
    service = device(tmp_path)
    plain = service.predict(X)
    by(service, "proto")
    assert 1e-6 < np.abs(service.predict(X) - plain).max() < 0.2


def test_a_new_sample_is_added_to_the_means_of_the_quantized_encoder(tmp_path: Path) -> None:
    service = device(tmp_path, toml="[personalize]\nint8 = true\n")
    relearn.personalize(service)
    new = samples(3, 7)
    for again in (service, homes.restored(folder_of(service))):
        before = again.local().added()
        said = relearn.learn(again, new.x, [CLASSES[k] for k in new.y])
        assert said["added_in_all"] == before + 3
        every = again.local().every()
        np.testing.assert_allclose(again.predict(X), wanted("proto", every.x, every.y, X), atol=1e-5)
        assert again.answers(X).graph == "embed-int8"


def test_it_is_off_by_default_and_can_be_set_in_device_toml(tmp_path: Path) -> None:
    assert device(tmp_path).answers(X).graph == "embed"
    (tmp_path / "set").mkdir()
    service = device(tmp_path / "set", toml="[personalize]\nint8 = true\n")
    assert relearn.personalize(service).how == "proto"
    assert service.answers(X).graph == "embed-int8"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["adapt", "none"])
def test_personalizers_that_embed_nothing_refuse_it(tmp_path: Path, way: str) -> None:
    service = device(tmp_path, "per-fedavg-fo")
    before = service.answers(X)
    with pytest.raises(ConfigError, match="int8 needs a personalizer that embeds samples") as refused:
        by(service, way)
    assert (refused.value.expected, "--fp32" in str(refused.value.hint)) == ("one of proto, head, knn", True)
    assert service.answers(X) == before


def test_int8_without_a_quantized_encoder_is_refused_with_what_provides_one(tmp_path: Path) -> None:
    service = device(tmp_path, int8=False)
    before = service.answers(X)
    with pytest.raises(ConfigError, match="round 7 came without an int8 encoder") as refused:
        by(service, "proto")
    assert "metafleet export FLEET --int8" in str(refused.value.hint)
    assert service.answers(X) == before


def test_a_new_round_brings_no_quantized_encoder_and_answers_by_the_graph(tmp_path: Path) -> None:
    service = device(tmp_path, toml="[personalize]\nint8 = true\n")
    relearn.personalize(service)
    params = served_params(METHODS["pfldyn-proto"], service.layout)
    service.load(METHODS["pfldyn-proto"], {}, homes.weights_of(params, 8))
    assert (service.answers(X).round, service.answers(X).graph) == (8, "embed")
    assert homes.restored(folder_of(service)).answers(X) == service.answers(X)


@pytest.mark.parametrize("harm", ["damaged", "gone", "another's"])
def test_a_quantized_encoder_that_is_not_sound_costs_no_answer(tmp_path: Path, harm: str) -> None:
    service = device(tmp_path)
    plain = service.answers(X)
    by(service, "proto")
    path = service.slots.path(service.slots.pointer().slot, "int8")
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        turned = bytearray(data)
        turned[len(data) // 2] ^= 1
        model = service.answers(X).model.encode()
        path.write_bytes(turned if harm == "damaged" else data.replace(model, b"0" * len(model)))
    assert homes.restored(folder_of(service)).answers(X) == plain


def test_the_commands_say_which_graph_answers(tmp_path: Path, capsys: Any) -> None:
    service = device(tmp_path)
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "show", shown.append)
        device_commands.personalize(folder_of(service), True, None, None, None, True)
        device_commands.status(folder_of(service), True)
        device_commands.personalize(folder_of(service), True, "head", None, None, None)
        device_commands.personalize(folder_of(service), True, "head", None, None, False)
    assert [facts["graph"] for facts in shown] == ["embed-int8", "embed-int8", "embed-int8", "embed"]
    device_commands.personalize(folder_of(service), False, None, None, None, True)
    assert ", embedded in int8, meta-model of round 7" in capsys.readouterr().out
    answer = homes.restored(folder_of(service)).answers(X)
    assert messages.decode(Answer, messages.encode(answer)).graph == "embed-int8"
