"""The interface of a method: gradient estimator × correction × server rule × personalizer × what is shared.

A client rule turns a broadcast and a stream of gradients into an update; a server rule turns updates into the next
model. Both are pure: state in, state out. The interface is the gradient, not the loss, because first-order,
hessian-free and Moreau directions are not derivatives of any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from fleet_core.algorithms import optimizers
from fleet_core.base import schema, trees
from fleet_core.base.trees import Params

ADAPTATIONS = (
    "none", "proto", "maml-exact", "maml-first-order", "maml-hessian-free", "meta-sgd", "metavers", "fedproto", "gp",
    "joint",
)  # fmt: skip
"""The gradient estimators of ``fleet_core.learning.gradient_estimators``."""
OWN_LABELS = ("proto", "metavers", "gp")
"""Adaptations for which a label is only a number within the episode: they use no head. They count the classes of the
device, not those of the fleet, which may have a thousand where a device has two."""
EPISODIC = (*OWN_LABELS, "joint")
"""Adaptations that compare a query with the support's classes."""
INNER = ("maml-exact", "maml-first-order", "maml-hessian-free", "meta-sgd")
"""Adaptations that take gradient steps of their own, in all arrays."""
PERSONALIZERS = ("none", "proto", "sgd", "meta-sgd", "own", "moreau", "knn", "gp", "fleet-proto")
AUGMENTATIONS = ("none", "crop-flip")
MOST = 100_000
LARGEST = 1e6

GradFn = Callable[[Params], Params]
"""Gradient of one step's loss at the given parameters, on that step's own samples; same groups and names back."""

ClientState = Mapping[str, Params]
"""What a device remembers between rounds, by role (``dual``, ``control``, ``personal``); may be empty."""


@dataclass(frozen=True)
class Payload:
    """What crosses the wire: named arrays by group, and scalars."""

    groups: Params
    scalars: Mapping[str, float] = field(default_factory=dict)

    def beside(self, per_device: Params) -> Payload:
        """This payload plus groups that one device alone received."""
        return Payload({**self.groups, **per_device}, self.scalars) if per_device else self


@dataclass(frozen=True)
class Update:
    """One device's verified contribution to a round. ``payload.groups`` holds float32 numpy arrays on the
    server; ``aggregation.total`` sums in float64."""

    device: str
    payload: Payload
    samples: int = 0


@dataclass(frozen=True)
class ServerState:
    """The aggregator's memory between rounds.

    model: what devices train on (the anchor of the next round).
    served: the model that devices personalize and answer with.
    memory: what the server rule remembers, by role (``dual`` for PFLDyn). scalars: numbers that it remembers.
    dual_epoch: increases when the devices' own state must start again from zero.
    round: the round that ``apply`` closes; its caller sets it.
    """

    model: Params
    served: Params
    memory: Mapping[str, Params] = field(default_factory=dict)
    dual_epoch: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)
    round: int = 0


def count(default: int, least: int = 1, most: int = MOST) -> Any:
    """A hyper-parameter that is a whole number."""
    return field(default=default, metadata={"min": least, "max": most})


def positive(default: float, most: float = LARGEST) -> Any:
    """A hyper-parameter above 0: a rate, or a weight that something is divided by."""
    return field(default=default, metadata={"above": 0, "max": most})


def weight(default: float | None, most: float = LARGEST) -> Any:
    """A hyper-parameter of at least 0; at 0 the weighted term is left out."""
    return field(default=default, metadata={"min": 0, "max": most})


def one_of(default: str, choices: tuple[str, ...]) -> Any:
    """A hyper-parameter that is a name."""
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """Hyper-parameters of the local SGD that every method here runs.

    local_steps: K (Fallah: τ), steps per device and round.
    client_lr: β, the device's learning rate (Acar: 0.1). lr_decay: its factor per round (Acar's runs: 0.997).
    local_optimizer: SGD, or Adam with moments that are reset in every round.
    weight_decay: added to the direction after clipping. clip_norm: limit on the corrected direction's norm, 0 for none
    (both in the order of the program of Acar et al.; their paper has neither).
    augment: augmentation of training images; ``crop-flip`` is a random crop with padding 4 and a horizontal flip
    (Acar's runs).
    """

    local_steps: int = count(20)
    client_lr: float = positive(0.1)
    lr_decay: float = positive(1.0, most=1)
    local_optimizer: str = one_of("sgd", optimizers.LOCAL)
    weight_decay: float = weight(0.0)
    clip_norm: float = weight(10.0)
    augment: str = one_of("none", AUGMENTATIONS)

    def unread(self, method: Method) -> dict[str, str]:
        """{setting: why} of the settings that do nothing in ``method`` with these values."""
        return {}


class ClientRule:
    """The device half. Subclasses override what they need. ``keeps``: the roles of its state."""

    keeps: tuple[str, ...] = ()

    def init(self, model: Params, personal: Params, hyper: Any) -> ClientState:
        """State of a device that never took part. model: what it received. personal: the initial values, the same on
        every device, of the groups that stay on it."""
        return {}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Any
    ) -> tuple[Payload, ClientState]:
        """Local training. Returns the update and the state that becomes the device's once the update is counted."""
        raise NotImplementedError

    def after_loss(self, pending: ClientState, error: Params, hyper: Any, round_number: float) -> ClientState:
        """The pending state when a codec *without* error feedback lost ``error`` = own update − decoded update."""
        return pending


class ServerRule:
    """The aggregator half. Subclasses override what they need. serves: what the served model is, for planned costs:
    the training ``model``, the ``mean`` of members' models (the training model while every member takes part), or
    ``another``. sums: ``apply`` needs only the sum or mean of the updates and of their scalars, which a robust one may
    replace (``fleet_core.robust``)."""

    serves: ClassVar[str] = "model"
    sums: ClassVar[bool] = False

    def init(self, first: Params, hyper: Any) -> ServerState:
        """first: initial values of every group that goes down; groups that are not the model's own are zero."""
        return ServerState(model=first, served=first)

    def sends_changes(self, hyper: Any) -> bool:
        """Whether what a device sends is the change of its model in the round, for comparisons of methods."""
        return self.sums

    def broadcast(self, state: ServerState) -> Payload:
        """What a cohort receives, the same for every device."""
        return Payload(state.model)

    def per_device(self, state: ServerState, device: str) -> Params:
        """What only ``device`` receives beside the broadcast: the groups in the method's ``per_device``."""
        return {}

    def as_received(self, state: ServerState, groups: Params) -> ServerState:
        """``state`` with the broadcast as devices decoded it (``groups``) instead of the exact one."""
        return replace(state, model=groups)

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Any) -> ServerState:
        """Close a round. ``updates`` can be iterated again and comes in closing order; ``members`` is m."""
        raise NotImplementedError

    def weighted(self, hyper: Any) -> bool:
        """Whether ``apply`` weights an update by its device's samples."""
        return bool(getattr(hyper, "weighted", False))

    def joined(self, state: ServerState, members: int, new: int = 1) -> ServerState:
        """``new`` devices enrolled; ``members`` counts them."""
        return state

    def left(self, state: ServerState, members: int) -> ServerState:
        """A device that had taken part left, or lost its state; ``members`` no longer counts it."""
        return state


@dataclass(frozen=True)
class Method:
    """A named method: one row of choices.

    adaptation: gradient estimator in training, of ``ADAPTATIONS``.
    personalizer: what a device does at deployment, of ``PERSONALIZERS``: ``none``; ``proto``, class means; ``sgd``,
    gradient steps; ``meta-sgd``, steps with learned rates; ``own``, its own groups, trained; ``moreau``, its own
    envelope's minimiser; ``knn``, its samples' neighbours beside the head; ``gp``, Gaussian processes of its samples;
    ``fleet-proto``, its own encoder and the fleet's class means.
    shared: groups that go down, come up and are evaluated. besides: groups that only go down, in training. per_device:
    shared groups of which the server makes one for each device in training. personal: groups of the model that stay on
    the device. A group that is in none of these lists is not used. down_scalars, up_scalars: numbers that cross the
    wire beside the round and the seed. models_down, models_up: models transmitted per device and round. paper_models:
    as the paper counts, if it differs. cumulative: an update is a change that the server sums over rounds, so that
    error feedback is possible."""

    name: str
    title: str
    source: str
    hyper: type[Any]
    client: ClientRule
    server: ServerRule
    adaptation: str
    personalizer: str
    shared: tuple[str, ...] = ("body", "head")
    personal: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()
    per_device: tuple[str, ...] = ()
    down_scalars: tuple[str, ...] = ()
    up_scalars: tuple[str, ...] = ()
    models_down: int = 1
    models_up: int = 1
    paper_models: tuple[int, int] | None = None
    cumulative: bool = True
    version: int = 1

    @property
    def down(self) -> tuple[str, ...]:
        """The groups for training that are the same for all devices."""
        return tuple(group for group in self.received if group not in self.per_device)

    @property
    def received(self) -> tuple[str, ...]:
        """The groups that a device receives for training."""
        return self.shared + self.besides

    @property
    def moving(self) -> tuple[str, ...]:
        """The groups that a device's gradient steps change when it personalizes the served model."""
        return self.personal or self.per_device if self.personalizer == "own" else (*self.shared, *self.personal)

    @property
    def keeps_weights(self) -> bool:
        """Whether a device answers with weights that its own rounds have left on it."""
        return bool(self.personal or self.per_device or self.personalizer == "own")

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graphs that a device answers with: ``embed`` for its own samples or class means, ``predict`` for a shared
        head or gradient steps."""
        if self.personalizer in ("proto", "gp", "fleet-proto", "knn"):
            return ("embed", "predict") if "head" in self.shared else ("embed",)
        return ("predict",)

    @property
    def needs_classes(self) -> str:
        """Why this method cannot learn a task without classes, as half a sentence; empty if it can."""
        if self.adaptation in (*EPISODIC, "fedproto"):
            return "compares samples with those of each class in training"
        if self.personalizer in ("proto", "gp", "fleet-proto", "knn"):
            return "answers with the class of a device's nearest samples"
        return ""

    def params(self, model: Params) -> dict[str, dict[str, Any]]:
        """The part of ``model`` that this method trains and sends."""
        return trees.only(model, self.shared)


def read_hyper(method: Method, values: Mapping[str, Any]) -> tuple[Any, list[schema.Problem]]:
    """(hyper-parameters from what a person wrote, []) or (None, problems). A setting that does nothing in this method
    with these values is a problem, unless it has its default."""
    hyper, problems = schema.read(method.hyper, values)
    wrong = {problem.key for problem in problems}
    legible = schema.read(method.hyper, {k: v for k, v in values.items() if k not in wrong})[0] if wrong else hyper
    unread = legible.unread(method) if isinstance(legible, LocalSgd) else {}
    default = {field.name: field.default for field in fields(method.hyper)}
    problems += [schema.Problem(name, f"does nothing here: {why}") for name, why in unread.items()
                 if name in values and name not in wrong and getattr(legible, name) != default[name]]
    return (None, problems) if problems else (hyper, [])


def own_steps(method: Method, hyper: Any, *, trained: bool = False) -> tuple[float, int]:
    """(learning rate, number) of the gradient steps that personalize the served model.

    trained: the device took part in rounds, so its own groups are trained already.
    """
    if method.personalizer == "sgd" and hasattr(hyper, "inner_steps"):
        return hyper.inner_lr, hyper.inner_steps
    if method.personalizer == "sgd" or (method.personalizer == "own" and method.moving and not trained):
        return hyper.finetune_lr, hyper.finetune_steps
    return 0.0, 0


def rate(hyper: LocalSgd, round_number: float) -> float:
    """The learning rate that steps *and* divides in round 1, 2, …: β · decay^(round-1)."""
    return float(hyper.client_lr * hyper.lr_decay ** (round_number - 1))


def descend(
    anchor: Params,
    steps: Iterable[GradFn],
    hyper: LocalSgd,
    lr: float,
    correction: Callable[[Params], Params] | None = None,
) -> Params:
    """From ``anchor``: w ← w − lr (clip(grad(w) + correction(w)) + weight_decay · w), once per gradient."""
    w: Params = anchor
    moments: optimizers.ClassMoments | None = None
    for gradient in steps:
        direction = gradient(w)
        if correction is not None:
            direction = trees.add(direction, correction(w))
        direction = trees.clip(direction, hyper.clip_norm)
        if hyper.weight_decay:
            direction = trees.axpy(hyper.weight_decay, w, direction)
        if hyper.local_optimizer == "adam":
            direction, moments = optimizers.adam(direction, moments)
        w = trees.axpy(-lr, direction, w)
    return w
