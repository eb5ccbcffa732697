"""The named methods, each one row of choices. Installed packages may add more."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_core.algorithms.interface import LocalSgd, Method, count, one_of, positive, weight
from fleet_core.algorithms.methods.average import LARGEST_BETA, AverageClient, AverageServer, Averaging
from fleet_core.algorithms.methods.dyn import Dyn, DynClient, DynServer
from fleet_core.algorithms.methods.fedproto import PrototypeClient, PrototypeServer, Pull
from fleet_core.algorithms.methods.joint import Joint
from fleet_core.algorithms.methods.meta import FedMeta, GradientClient, GradientServer, RatesServer, RatesStart
from fleet_core.algorithms.methods.metavers import MARGIN, Margins, VersClient, VersServer
from fleet_core.algorithms.methods.moreau import Moreau, MoreauClient
from fleet_core.algorithms.methods.partial_sharing import (
    FrozenHeadClient,
    HeadFirst,
    HeadFirstClient,
    KeepingClient,
    NoServer,
)
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.algorithms.methods.pfedhn import Hyper, HyperClient, HyperServer
from fleet_core.algorithms.methods.prox import Prox, ProxClient
from fleet_core.algorithms.methods.scaf import Scaf, ScafClient, ScafServer
from fleet_core.algorithms.optimizers import SERVER
from fleet_core.algorithms.plugins import Methods

DISTANCES = ("squared", "norm")


@dataclass(frozen=True, kw_only=True)
class Episodic(LocalSgd):
    """support_batch: |D|, samples for adaptation. query_batch: |D'|, disjoint samples for the meta-gradient. draws:
    both at ``random`` in every step, or as batches of a shuffled ``pass``, as in the program of Acar et al."""

    support_batch: int = count(50)
    query_batch: int = count(50)
    draws: str = one_of("random", ("random", "pass"))


@dataclass(frozen=True, kw_only=True)
class Plain(LocalSgd):
    """batch: samples per gradient, without a split into support and query."""

    batch: int = count(100)


@dataclass(frozen=True, kw_only=True)
class FineTune(Plain):
    """finetune_lr, finetune_steps: SGD on all of the device's own samples after training (defaults: the best of
    ``benchmarks/heartbeat/choose.py`` on its validation split)."""

    finetune_lr: float = positive(0.05)
    finetune_steps: int = count(50, least=0)

    def unread(self, method: Method) -> dict[str, str]:
        none = {} if self.finetune_steps else {"finetune_lr": "there are no finetune_steps"}
        return {**super().unread(method), **none}


@dataclass(frozen=True, kw_only=True)
class Proto(Episodic):
    """distance: between representations; ``squared`` (Acar, Snell) or ``norm`` (Lim). draws: also ``balanced``, at
    random, as many samples of each of the device's classes, as far as it has them."""

    draws: str = one_of("random", ("random", "pass", "balanced"))
    distance: str = one_of("squared", DISTANCES)


@dataclass(frozen=True, kw_only=True)
class Maml(Episodic):
    """inner_lr: η (Fallah, Chen: α), the adaptation rate. inner_steps: SGD steps of the adaptation."""

    inner_lr: float = positive(0.01)
    inner_steps: int = count(1)


@dataclass(frozen=True, kw_only=True)
class OneForAll(FineTune):
    """The shared model answers without fine-tuning, unless finetune_steps is set."""

    finetune_steps: int = count(0, least=0)


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging, OneForAll):
    """FedAvg."""


@dataclass(frozen=True, kw_only=True)
class FedAvgMeta(Averaging, FineTune):
    """FedAvg(Meta): FedAvg, fine-tuned on each device."""


@dataclass(frozen=True, kw_only=True)
class FedProx(Prox, OneForAll):
    """FedProx."""


@dataclass(frozen=True, kw_only=True)
class FedDyn(Dyn, OneForAll):
    """FedDyn."""


@dataclass(frozen=True, kw_only=True)
class Scaffold(Scaf, OneForAll):
    """SCAFFOLD."""


@dataclass(frozen=True, kw_only=True)
class PAvgProto(Averaging, Proto):
    """Averaging with Proto adaptation."""


@dataclass(frozen=True, kw_only=True)
class FedAvgJoint(Joint, PAvgProto):
    """FedAvg-joint."""


@dataclass(frozen=True, kw_only=True)
class PFLDynProto(Dyn, Proto):
    """PFLDyn with Proto adaptation."""


@dataclass(frozen=True, kw_only=True)
class PFLDynMaml(Dyn, Maml):
    """PFLDyn with MAML adaptation (Acar: penalty 0.01, five inner steps at 0.01)."""

    penalty: float = positive(0.01)
    inner_steps: int = count(5)


@dataclass(frozen=True, kw_only=True)
class PFLScafProto(Scaf, Proto):
    """PFLScaf with Proto adaptation."""


@dataclass(frozen=True, kw_only=True)
class PFLScafMaml(Scaf, Maml):
    """PFLScaf with MAML adaptation (Acar: one inner step at 0.1)."""

    inner_lr: float = positive(0.1)


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Averaging, Maml):
    """independent_hessian_batch: computes the Hessian on a third batch D'' (Fallah, eq. 8) instead of D."""

    clip_norm: float = weight(0.0)
    independent_hessian_batch: bool = False

    def unread(self, method: Method) -> dict[str, str]:
        first_order = method.adaptation == "maml-first-order"
        dropped = {"independent_hessian_batch": "the first order has no Hessian"} if first_order else {}
        return {**super().unread(method), **dropped}


@dataclass(frozen=True, kw_only=True)
class HessianFree(PerFedAvg):
    """difference: δ of the central difference, relative to ‖w‖/‖v‖. A smaller δ would amplify float32's rounding and
    the effect of a ReLU's kink, which are divided by it."""

    difference: float = positive(1e-2, most=1)


@dataclass(frozen=True, kw_only=True)
class FedMetaMaml(FedMeta, Maml):
    """FedMeta with MAML."""


@dataclass(frozen=True, kw_only=True)
class MetaSgd(FedMeta, RatesStart, Episodic):
    """FedMeta with Meta-SGD."""


@dataclass(frozen=True, kw_only=True)
class PFedMe(Moreau, Plain):
    """pFedMe (the paper: batches of 20, R = 20)."""

    batch: int = count(20)


@dataclass(frozen=True, kw_only=True)
class MetaVers(Margins, Proto):
    """The defaults are those of the authors' program. The paper prints another ``distance`` and ``negative``, and a
    ``triplet_sum`` and ``margin_divisor`` with which the loss grows without limit (``benchmarks/papers/lim``).

    shots, query_shots: samples of each class in an episode; 0: support_batch and query_batch at random. distance: the
    distance everywhere but in the margin; ``norm`` as printed. margin_distance: the distance between centroids.
    triplet_sum: L_T is the sum over all triplets instead of their mean. margin_divisor: the divisor of eq. 3;
    ``printed`` is (N − 1)², ``pairs`` is N(N − 1). negative: what eq. 4 compares with; ``positive`` is d(x_p, x_n) as
    printed, ``centroid`` is d(a, x_n) as in the program. fixed_margin: the margin of all triplets, as Lim's Table 5 has
    it for triplets alone; 0 for the moving one. loss_share: 1 is the cross-entropy alone. Optimizer and rates are in
    the paper's supplement; in the program the server steps with Adam at 1e-3 along the sum of one gradient of each
    device. Here it steps along their mean times client_lr, which is the same to Adam but for server_epsilon, a larger
    one for a smaller direction."""

    distance: str = one_of("squared", DISTANCES)
    margin_distance: str = one_of("norm", DISTANCES)
    shots: int = count(5, least=0)
    query_shots: int = count(15)
    triplet_sum: bool = False
    margin_divisor: str = one_of("pairs", ("printed", "pairs"))
    negative: str = one_of("centroid", ("positive", "centroid"))
    fixed_margin: float = field(default=0.0, metadata={"min": 0, "max": 1e6, "sparse": True})
    local_steps: int = count(1)
    client_lr: float = positive(1e-3)
    clip_norm: float = weight(0.0)
    server_optimizer: str = one_of("adam", SERVER)
    server_lr: float = positive(1e-3)
    server_beta2: float = weight(0.999, most=LARGEST_BETA)
    server_epsilon: float = positive(1e-8)

    def unread(self, method: Method) -> dict[str, str]:
        by_class = dict.fromkeys(("support_batch", "query_batch", "draws"), "shots and query_shots say what is drawn")
        at_random = {"query_shots": "without shots, query_batch says what is drawn"}
        alone = dict.fromkeys(("warm_up", "triplet_sum", "negative", "fixed_margin"),
                              "with loss_share = 1 there are no triplets")
        return {
            **super().unread(method), **(by_class if self.shots else at_random),
            **(alone if self.loss_share == 1 else {}),
        }


@dataclass(frozen=True, kw_only=True)
class FedRep(HeadFirst, Averaging, FineTune):
    """FedRep: the head first, then the body."""


@dataclass(frozen=True, kw_only=True)
class FedBabu(Averaging, FineTune):
    """FedBABU; Lim et al. fine-tune it by ten steps for evaluation."""

    finetune_steps: int = count(10, least=0)


@dataclass(frozen=True, kw_only=True)
class FedProto(Pull, FineTune):
    """FedProto."""


@dataclass(frozen=True, kw_only=True)
class PFedHN(Hyper, FineTune):
    """pFedHN."""


@dataclass(frozen=True, kw_only=True)
class PFedGP(Averaging, Gaussian, Episodic):
    """pFedGP."""


@dataclass(frozen=True, kw_only=True)
class KnnPer(Averaging, Plain):
    """neighbours: k. mixture: λ, the neighbours' weight in the answer; None chooses the one with the best leave-one-out
    accuracy on the device's own samples."""

    neighbours: int = count(10)
    mixture: float | None = weight(None, most=1)


ACAR = "Acar et al. 2021, Debiasing Model Updates for Improving Personalized Federated Training, Alg. 1-2"
ACAR_DYN = "Acar et al. 2021, Federated Learning Based on Dynamic Regularization, Alg. 1"
CHEN = "Chen et al. 2018, Federated Meta-Learning with Fast Convergence and Efficient Communication, Alg. 1"
DINH = "Dinh et al. 2020, Personalized Federated Learning with Moreau Envelopes, Alg. 1"
FALLAH = "Fallah et al. 2020, Personalized Federated Learning: A Meta-Learning Approach, Alg. 1"
KARIMIREDDY = "Karimireddy et al. 2020, SCAFFOLD, Alg. 1"
LIM = "Lim et al. 2024, MetaVers: Meta-Learned Versatile Representations, eq. 1-7"
MCMAHAN = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, Alg. 1"

HEADLESS = ("body",)

PRODUCT: dict[str, Method] = {
    method.name: method
    for method in (
        Method("fedavg", "Federated averaging of one model for all", MCMAHAN, FedAvg,
               AverageClient(), AverageServer(), adaptation="none", personalizer="sgd"),
        Method("fedavg-meta", "Federated averaging, fine-tuned by every device", "Chen et al. 2018, Federated "
               "Meta-Learning with Fast Convergence and Efficient Communication, FedAvg(Meta) of Table 2", FedAvgMeta,
               AverageClient(), AverageServer(), adaptation="none", personalizer="sgd"),
        Method("fedprox", "Averaging with a proximal term", "Li et al. 2020, Federated Optimization in Heterogeneous "
               "Networks, Alg. 2", FedProx, ProxClient(), AverageServer(), adaptation="none", personalizer="sgd"),
        Method("feddyn", "Dynamic regularization of one model for all", ACAR_DYN, FedDyn,
               DynClient(), DynServer(), adaptation="none", personalizer="sgd"),
        Method("scaffold", "Control variates for one model for all", KARIMIREDDY, Scaffold,
               ScafClient(), ScafServer(), adaptation="none", personalizer="sgd",
               besides=("control",), models_down=2, paper_models=(2, 2)),
        Method("p-avg-proto", "Averaging with prototype adaptation", ACAR, PAvgProto,
               AverageClient(), AverageServer(), adaptation="proto", personalizer="proto", shared=HEADLESS),
        Method("pfldyn-proto", "Dynamic regularization with prototype adaptation", ACAR, PFLDynProto,
               DynClient(), DynServer(), adaptation="proto", personalizer="proto", shared=HEADLESS),
        Method("pfldyn-maml", "Dynamic regularization with MAML adaptation", ACAR, PFLDynMaml,
               DynClient(), DynServer(), adaptation="maml-exact", personalizer="sgd"),
        Method("pflscaf-proto", "Control variates with prototype adaptation", ACAR, PFLScafProto,
               ScafClient(), ScafServer(), adaptation="proto", personalizer="proto", shared=HEADLESS,
               besides=("control",), models_down=2, paper_models=(2, 2)),
        Method("pflscaf-maml", "Control variates with MAML adaptation", ACAR, PFLScafMaml,
               ScafClient(), ScafServer(), adaptation="maml-exact", personalizer="sgd",
               besides=("control",), models_down=2, paper_models=(2, 2)),
        Method("per-fedavg-exact", "Averaging with MAML adaptation", FALLAH, PerFedAvg,
               AverageClient(), AverageServer(), adaptation="maml-exact", personalizer="sgd"),
        Method("per-fedavg-fo", "Averaging with first-order MAML adaptation", FALLAH, PerFedAvg,
               AverageClient(), AverageServer(), adaptation="maml-first-order", personalizer="sgd"),
        Method("per-fedavg-hf", "Averaging with Hessian-free MAML adaptation", FALLAH, HessianFree,
               AverageClient(), AverageServer(), adaptation="maml-hessian-free", personalizer="sgd"),
        Method("fedmeta-maml", "Meta-gradients of MAML, stepped by the server", CHEN, FedMetaMaml,
               GradientClient(), GradientServer(), adaptation="maml-exact", personalizer="sgd"),
        Method("fedmeta-fomaml", "Meta-gradients of first-order MAML, stepped by the server", CHEN, FedMetaMaml,
               GradientClient(), GradientServer(), adaptation="maml-first-order", personalizer="sgd"),
        Method("fedmeta-metasgd", "Meta-gradients with learned adaptation rates, stepped by the server", CHEN, MetaSgd,
               GradientClient(), RatesServer(), adaptation="meta-sgd", personalizer="meta-sgd",
               shared=("body", "head", "rates"), models_down=2, models_up=2),
        Method("pfedme", "Personal models tied to the shared one by a Moreau envelope", DINH, PFedMe,
               MoreauClient(), AverageServer(), adaptation="none", personalizer="moreau"),
        Method("metavers", "Prototypes with a triplet margin that grows", LIM, MetaVers,
               VersClient(), VersServer(), adaptation="metavers", personalizer="proto", shared=HEADLESS,
               down_scalars=(MARGIN,), up_scalars=(MARGIN,)),
        Method("local", "Every device alone", "a baseline: nothing is shared", FineTune,
               KeepingClient(), NoServer(), adaptation="none", personalizer="own",
               shared=(), personal=("body", "head"), models_down=0, models_up=0),
        Method("fedper", "A shared body under heads of one's own", "Arivazhagan et al. 2019, Federated Learning with "
               "Personalization Layers, Alg. 1", FedAvgMeta, KeepingClient(), AverageServer(),
               adaptation="none", personalizer="own", shared=HEADLESS, personal=("head",)),
        Method("fedrep", "A shared body under heads of one's own, the head trained first", "Collins et al. 2021, "
               "Exploiting Shared Representations for Personalized Federated Learning, Alg. 1", FedRep,
               HeadFirstClient(), AverageServer(), adaptation="none", personalizer="own",
               shared=HEADLESS, personal=("head",)),
        Method("fedbabu", "A shared body under a head that is not trained", "Oh et al. 2022, FedBABU, Alg. 1", FedBabu,
               FrozenHeadClient(), AverageServer(), adaptation="none", personalizer="sgd",
               shared=HEADLESS, personal=("head",)),
        Method("lg-fedavg", "A shared head over bodies of one's own", "Liang et al. 2020, Think Locally, Act Globally, "
               "Alg. 1", FedAvgMeta, KeepingClient(), AverageServer(), adaptation="none", personalizer="own",
               shared=("head",), personal=("body",)),
        Method("fedproto", "Only class means are shared", "Tan et al. 2022, FedProto, Alg. 1", FedProto,
               PrototypeClient(), PrototypeServer(), adaptation="fedproto", personalizer="fleet-proto",
               shared=("prototypes",), personal=("body", "head"), models_down=0, models_up=0, cumulative=False),
        Method("pfedhn", "A hypernetwork makes every device's model", "Shamsian et al. 2021, Personalized Federated "
               "Learning using Hypernetworks, Alg. 1", PFedHN, HyperClient(), HyperServer(),
               adaptation="none", personalizer="own", per_device=("body", "head")),
        Method("pfedgp", "Gaussian processes on a shared representation", "Achituve et al. 2021, Personalized "
               "Federated Learning with Gaussian Processes, Section 4", PFedGP, AverageClient(), AverageServer(),
               adaptation="gp", personalizer="gp", shared=HEADLESS),
        Method("knn-per", "Federated averaging, answered with a device's own neighbours", "Marfoq et al. 2022, "
               "Personalized Federated Learning through Local Memorization, Alg. 1", KnnPer,
               AverageClient(), AverageServer(), adaptation="none", personalizer="knn"),
        Method("fedavg-joint", "Federated averaging of one model for class means and a head", "no paper: the losses of "
               "fedavg and p-avg-proto in one", FedAvgJoint, AverageClient(), AverageServer(), adaptation="joint",
               personalizer="proto"),
    )
}

METHODS = Methods(PRODUCT)
"""All methods by name: the product's, then those of installed packages."""
