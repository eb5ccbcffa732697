"""The code in the documentation: it type-checks, its imports exist, and the methods of seam.md do what they say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.algorithms import trees
from fleet_core.algorithms.average import AverageClient, AverageServer
from fleet_core.algorithms.seam import LocalSgd, Payload, ServerState, Update
from fleet_core.learning import gradients, models
from tests.quadratics import SIZE, Cohort, draws, quadratics, tree, vector

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(page: Path) -> str:
    """The page's python blocks, each on the lines where it stands, so that a complaint names the page's own line."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block[1].splitlines()):
            lines[start + offset] = line
    return "\n".join(lines).rstrip() + "\n"


PAGES = {page.stem: source for page in sorted((ROOT / "docs").glob("**/*.md")) if (source := code(page)).strip()}


def test_there_is_code_to_check() -> None:
    assert "seam" in PAGES
    assert sum(PAGES["seam"].count(f"class {name}(") for name in ("ScafClient", "MoreauClient", "VersServer")) == 3


def test_the_blocks_of_every_page_type_check_strictly(tmp_path: Path) -> None:
    files = []
    for name, source in PAGES.items():
        files.append(tmp_path / f"docs_{name.replace('-', '_')}.py")
        files[-1].write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_the_imports_of_every_page_exist(name: str) -> None:
    nodes = ast.walk(ast.parse(PAGES[name]))
    imports: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), name, "exec"), {})


# The methods of seam.md -----------------------------------------------------------------------------------------------

SMOOTHNESS = 8.0
DEVICES = quadratics(8, seed=0, mu=0.5, smoothness=SMOOTHNESS)
EXACT: dict[str, Any] = {"local_steps": 10, "client_lr": 1 / SMOOTHNESS, "clip_norm": 0.0}


@pytest.fixture(scope="module")
def page() -> Any:
    """The module that the blocks of seam.md make."""
    module = ModuleType("seam_page")
    sys.modules["seam_page"] = module  # dataclasses look their module up
    exec(compile(PAGES["seam"], "docs/seam.md", "exec"), module.__dict__)
    return module


def run(rule: Any, hyper: Any, groups: Any, state: Any = None, **scalars: float) -> tuple[Payload, Any]:
    """One round of device-0 from ``groups``."""
    steps = [DEVICES["device-0"].gradient] * hyper.local_steps
    return rule.run(Payload(groups, {"round": 1.0, **scalars}), state or rule.init(groups, hyper), steps, hyper)


def test_fedprox_with_no_proximity_is_fedavg_and_else_ends_at_the_closed_form(page: Any) -> None:
    anchor = tree(np.ones(SIZE))
    plain, _ = run(AverageClient(), LocalSgd(**EXACT), anchor)
    none, _ = run(page.ProxClient(), page.Prox(**EXACT, proximity=0.0), anchor)
    assert vector(none.groups).tobytes() == vector(plain.groups).tobytes()
    long = page.Prox(local_steps=200, client_lr=0.1, clip_norm=0.0, proximity=2.0)
    near, _ = run(page.ProxClient(), long, anchor)
    loss = DEVICES["device-0"]
    closed = np.linalg.solve(loss.hessian + 2 * np.eye(SIZE), loss.hessian @ loss.minimum + 2 * np.ones(SIZE))
    np.testing.assert_allclose(vector(near.groups) + 1, closed, atol=1e-12)


@pytest.mark.parametrize(("active", "rounds"), [(8, 150), (4, 400)])
def test_pflscaf_finds_the_minimiser_and_its_control_is_the_mean_of_the_devices(
    page: Any, active: int, rounds: int
) -> None:
    hyper = LocalSgd(**{**EXACT, "lr_decay": 0.999})
    fleet = Cohort(page.ScafClient(), page.ScafServer(), hyper, DEVICES, role="control")
    rng = np.random.default_rng(0)
    for names in draws(DEVICES, active, rounds, seed=1):
        fleet.round(names, lost=[name for name in names if rng.random() < 0.1])
        np.testing.assert_allclose(fleet.server_dual, fleet.mean_dual(), atol=1e-12)
    assert fleet.error < 1e-8


def test_pflscaf_with_all_controls_zero_is_averaging_for_that_round(page: Any) -> None:
    scaf = Cohort(page.ScafClient(), page.ScafServer(), LocalSgd(**EXACT), DEVICES)
    plain = Cohort(AverageClient(), AverageServer(), LocalSgd(**EXACT), DEVICES)
    for fleet in (scaf, plain):
        fleet.round(["device-1", "device-4"])
    assert scaf.model.tobytes() == plain.model.tobytes()


def test_a_control_packs_beside_the_model_and_unpacks(page: Any) -> None:
    model, control = tree(np.ones(SIZE)), tree(np.full(SIZE, 2.0))
    packed = page.packed(model, control, "control")
    assert list(packed["control"]) == ["body.a", "body.b", "head.c"]
    assert page.unpacked(packed, "control") == (model, control)


def bowl(name: str) -> gradients.Loss:
    """A device's loss on torch trees."""
    hessian, minimum = torch.tensor(DEVICES[name].hessian), torch.tensor(DEVICES[name].minimum)

    def value(w: Any) -> torch.Tensor:
        away = torch.cat([array.reshape(-1) for named in w.values() for array in named.values()]) - minimum
        return 0.5 * away @ hessian @ away

    return value


def test_meta_sgd_with_equal_rates_is_maml_and_the_rates_have_their_own_gradient(page: Any) -> None:
    w, one = models.to_torch(tree(np.ones(SIZE))), np.ones(SIZE)
    both = page.packed(w, trees.apply(lambda a: torch.full_like(a, 0.05), w), "rates")
    support, query = DEVICES["device-0"], DEVICES["device-1"]
    _, exact = gradients.maml_exact(bowl("device-0"), bowl("device-1"), 0.05, 1)(w)
    _, learned = page.meta_sgd(bowl("device-0"), bowl("device-1"))(both)
    of_w, of_rates = (vector(models.to_numpy(part)) for part in page.unpacked(learned, "rates"))
    np.testing.assert_allclose(of_w, vector(models.to_numpy(exact)), rtol=1e-6)
    slope = support.slope(one)
    np.testing.assert_allclose(of_rates, -slope * query.slope(one - 0.05 * slope), rtol=1e-5)


def test_the_meta_gradient_server_steps_on_the_mean(page: Any) -> None:
    hyper = page.MetaSgd(server_lr=0.5, local_steps=2)
    update, _ = run(page.GradientClient(), hyper, tree(np.ones(SIZE)))
    slope = DEVICES["device-0"].slope(np.ones(SIZE))
    np.testing.assert_allclose(vector(update.groups), slope, atol=1e-12)
    state = page.GradientServer().init(tree(np.ones(SIZE)), hyper)
    after = page.GradientServer().apply(state, [Update("a", update), Update("b", Payload(tree(slope * 3)))], 9, hyper)
    np.testing.assert_allclose(vector(after.model), 1 - 0.5 * 2 * slope, atol=1e-12)


def test_pfedme_finds_the_moreau_envelopes_minimum_and_moves_w_towards_it(page: Any) -> None:
    hyper = page.PFedMe(local_steps=1, client_lr=0.01, clip_norm=0.0, envelope=3.0, personal_steps=300)
    update, state = run(page.MoreauClient(), hyper, tree(np.ones(SIZE)))
    loss = DEVICES["device-0"]
    theta = np.linalg.solve(loss.hessian + 3 * np.eye(SIZE), loss.hessian @ loss.minimum + 3 * np.ones(SIZE))
    np.testing.assert_allclose(vector(state["personal"]), theta, atol=1e-12)
    np.testing.assert_allclose(vector(update.groups), -0.01 * 3 * (1 - theta), atol=1e-12)


def test_pfedme_mixes_and_with_a_mix_of_one_averages(page: Any) -> None:
    updates = [Update("a", Payload(tree(np.ones(SIZE)))), Update("b", Payload(tree(np.full(SIZE, 3.0))))]
    state = ServerState(tree(np.zeros(SIZE)), tree(np.zeros(SIZE)))
    half, one = (page.MixServer().apply(state, updates, 2, page.PFedMe(mix=mix)) for mix in (0.5, 1.0))
    assert vector(half.model).tolist() == [1.0] * SIZE
    assert vector(one.model).tolist() == vector(AverageServer().apply(state, updates, 2, LocalSgd()).model).tolist()


def test_fedrep_moves_its_head_first_and_sends_the_body_alone(page: Any) -> None:
    whole = tree(np.ones(SIZE))
    state = page.RepClient().init(whole, None)
    body = trees.only(whole, ("body",))
    head_only, after = run(page.RepClient(), page.FedRep(**EXACT, head_steps=10), body, state)
    assert (list(head_only.groups), trees.norm(head_only.groups)) == (["body"], 0.0)
    assert after["personal"]["head"]["c"] != 1
    body_only, after = run(page.RepClient(), page.FedRep(**EXACT, head_steps=0), body, state)
    assert trees.norm(body_only.groups) > 0.1
    assert after["personal"]["head"]["c"] == 1


def test_fedproto_adds_up_totals_and_keeps_a_class_that_nobody_had(page: Any) -> None:
    first = {"prototypes": {"total": np.array([[9.0, 9], [2, 4], [7, 7]]), "count": np.array([9.0, 2, 7])}}
    hyper = LocalSgd(local_steps=3, client_lr=0.1, clip_norm=0.0)

    def gradient(at: Any) -> Any:
        assert at["prototypes"] is first["prototypes"]
        measured = {"total": at["body"]["w"] * np.eye(3)[:, :2], "count": np.array([1.0, 1, 0])}
        return {"body": {"w": np.ones(())}, "prototypes": measured}

    state = page.PrototypeClient().init({"body": {"w": np.array(2.0)}}, hyper)
    broadcast = Payload(first, {"round": 1.0})
    update, state = page.PrototypeClient().run(broadcast, state, [gradient] * 3, hyper)
    assert state["personal"]["body"]["w"] == pytest.approx(1.7)
    np.testing.assert_allclose(update.groups["prototypes"]["total"], np.eye(3)[:, :2] * (2 + 1.9 + 1.8))
    updates = [Update("a", update), Update("b", update)]
    after = page.PrototypeServer().apply(ServerState(first, first), updates, 5, hyper)
    assert after.model["prototypes"]["count"].tolist() == [6.0, 6.0, 7.0]
    np.testing.assert_allclose(after.model["prototypes"]["total"], np.array([[11.4, 0], [0, 11.4], [7, 7]]))


def test_metavers_trains_with_the_larger_margin_and_averages_it_over_its_window(page: Any) -> None:
    rule, hyper = page.VersServer(), page.MetaVers(window=3, local_steps=2, client_lr=0.1)
    w = models.to_torch(tree(np.ones(SIZE)))
    state, reported, used = rule.init(w, hyper), [4.0, 1.0, 2.0, 8.0], []

    def loss(margin: float) -> gradients.Loss:
        used.append(margin)
        return bowl("device-0")

    for own in reported:
        broadcast = rule.broadcast(state)
        steps = [page.with_margin(loss, lambda w, own=own: own)] * 2
        payload, _ = page.VersClient().run(
            Payload(broadcast.groups, {**broadcast.scalars, "round": 1.0}), {}, steps, hyper
        )
        assert payload.scalars == {"margin": own}
        state = rule.apply(state, [Update("a", payload)], 1, hyper)
    m1 = 4.0
    m2 = (m1 + 1) / 2
    m3 = (m1 + m2 + 2) / 3
    assert used[::2] == [4.0, m1, m2, 8.0]
    assert page.margins(state) == [m2, m3, (m2 + m3 + 8) / 3]
    assert trees.norm(trees.subtract(state.model, w)) > 0.1
