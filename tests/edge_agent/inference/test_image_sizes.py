"""Images of any size reach the model with the same bits, from every kind of input, and as training saw them."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cloud_server.choices.first_settings import fleet_toml, load_data
from cloud_server.records.fleet_settings import FleetConfig
from edge_agent.commands import device_commands
from edge_agent.compute.onnx_session import Session
from edge_agent.http.http_messages import Head, Request
from edge_agent.http.inference_protocol import InferenceProtocol
from edge_agent.http.serve import ServedModel
from edge_agent.inference import relearn
from edge_agent.inference.service import Service
from export.graph import export_graph
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, trees
from fleet_core.base.errors import DataError
from fleet_core.data import samples as stored
from fleet_core.data import unlabelled
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import Layout
from fleet_core.protocol.device_messages import Question
from tests.support import homes

pytestmark = pytest.mark.slow

METHOD = "pfldyn-proto"
SIZES = ((40, 30), (24, 16), (7, 50), (9, 9), (64, 64), (31, 17))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of images of six sizes each."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    for label in ("green", "ripe"):
        (folder / label).mkdir(parents=True)
        for number, (width, height) in enumerate(SIZES):
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


@cache
def graph_of(layout: str) -> Graph:
    return export_graph(Layout.from_json(layout), kinds=("embed", "predict"))


@pytest.fixture(params=["letterbox", "stretch"])
def service(request: pytest.FixtureRequest, photos: Path, tmp_path: Path) -> Service:
    """A device of a fleet that was made of the photos, with photos of its own."""
    samples, spec = load_data(str(photos), size="24x16", fit=request.param)
    path = tmp_path / "fleet.toml"
    path.write_text(fleet_toml(samples, "shelf", METHOD, None, rounds=1, seed=0, spec=spec))
    model = config.load(FleetConfig, path).model
    layout = models.describe(model.name, model.input, model.classes, model.options)
    assert (layout.input.shape, layout.input.fit) == ((3, 16, 24), request.param)
    graph = graph_of(layout.to_json())
    params = trees.only(models.initial(layout, 1), METHODS[METHOD].shared)
    home = homes.home(tmp_path / "d0", toml=f'[data]\nsamples = "{photos}"\n[serve]\nworse_by = 1.0\n')
    return homes.service_with_model(home, METHOD, graph=graph, params=params)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every input of a session from now on."""
    found: list[Any] = []
    run = Session.run

    def noted(self: Session, x: Any) -> Any:
        found.append(np.array(x))
        return run(self, x)

    monkeypatch.setattr(Session, "run", noted)
    return found


def pixels_of(path: Path) -> np.ndarray[Any, Any]:
    """uint8 [1, 3, H, W]."""
    return np.asarray(Image.open(path)).transpose(2, 0, 1)[None]


def asked(service: Service, what: str, tensors: list[dict[str, Any]], binary: bytes = b"") -> Any:
    protocol = InferenceProtocol(ServedModel("t", service))
    text = json.dumps({"inputs": tensors}).encode()
    headers = {"inference-header-content-length": str(len(text))} if binary else {}
    response = protocol.answer(Request(Head("POST", f"/v2/models/t/{what}", headers), text + binary))
    assert response.status == 200, response.body
    return json.loads(response.body)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_photo_has_the_same_bits_over_every_path(
    service: Service, photos: Path, tmp_path: Path, seen: list[Any], number: int
) -> None:
    path, spec = photos / "ripe" / f"{number}.png", service.layout.input
    x, place = pixels_of(path), service.stored.home.folder
    np.save(tmp_path / "one.npy", x[0])
    np.savez(tmp_path / "one.npz", x=x)
    tensor = {"name": "x", "datatype": "UINT8", "shape": list(x.shape)}

    service.answers(x)
    service.predict(x)
    service.answer(Question(x.shape, "uint8", base64.b64encode(x.tobytes()).decode()))
    asked(service, "infer", [{**tensor, "data": x.ravel().tolist()}])
    asked(service, "infer", [{**tensor, "parameters": {"binary_data_size": x.size}}], x.tobytes())
    for file in (path, tmp_path / "one.npy", tmp_path / "one.npz"):
        service.answers(unlabelled.load(file, spec))
        device_commands.predict(file, place, as_json=True)
    device_commands.add(path, "ripe", place, new_class=False)
    asked(service, "samples", [{**tensor, "data": x.ravel().tolist()},
                               {"name": "label", "datatype": "BYTES", "shape": [1], "data": ["ripe"]}])
    relearn.learn(service, x, ["ripe"])

    trained, _ = load_data(str(photos), size="24x16", fit=spec.fit)
    wanted = trained.x[2 * number + 1]  # the classes take turns
    assert wanted.shape == (3, 16, 24)
    singles = [one[0] for one in seen if len(one) == 1]
    assert len(singles) >= 11
    assert all(np.array_equal(one, wanted) for one in singles)
    added = stored.load(service.local().added_path).x
    assert len(added) == 3
    assert all(np.array_equal(one, wanted) for one in added)


def test_a_device_learns_from_a_folder_as_the_fleet_did(service: Service, photos: Path) -> None:
    trained, _ = load_data(str(photos), size="24x16", fit=service.layout.input.fit)
    own = service.local().every()
    assert 0 < len(own) < len(trained)
    whole = {x.tobytes() for x in trained.x}
    assert {x.tobytes() for x in own.x} <= whole


def test_a_bundle_says_how_images_are_fitted_and_older_layouts_keep_their_hash(service: Service) -> None:
    layout = service.layout
    again = graph_bundle.unpack(graph_bundle.pack(service.checked_graph())).layout
    assert again == layout
    assert again.hash == layout.hash
    older = json.loads(layout.to_json())
    del older["input"]["fit"]
    assert "fit" not in json.loads(Layout.from_json(json.dumps(older)).to_json())["input"]


def test_over_http_the_metadata_tells_that_any_size_is_taken_and_other_shapes_are_refused(service: Service) -> None:
    protocol = InferenceProtocol(ServedModel("t", service))
    told = json.loads(protocol.answer(Request(Head("GET", "/v2/models/t", {}), b"")).body)
    assert told["inputs"][0]["shape"] == [-1, 3, -1, -1]
    for shape in ([1, 1, 16, 24], [1, 3, 0, 24], [1, 3, 16], [1, 3, 70_000, 1]):
        body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": shape, "data": []}]}).encode()
        refused = protocol.answer(Request(Head("POST", "/v2/models/t/infer", {}), body))
        assert refused.status == 400
        assert b"[1 to 4096, 3, height, width]" in refused.body


def test_images_of_several_sizes_need_a_size_and_the_error_says_how(photos: Path) -> None:
    with pytest.raises(DataError, match="--size 64"):
        load_data(str(photos))
    with pytest.raises(DataError, match="'large' is not an image size"):
        load_data(str(photos), size="large")
    with pytest.raises(DataError, match="'crop' is not a way to fit images"):
        load_data(str(photos), size="64", fit="crop")
