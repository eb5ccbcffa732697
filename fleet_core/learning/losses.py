"""Losses. ``F.cross_entropy`` is not used, because an exported graph multiplies its traced gradient by the batch size.

Prototypes: Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017, eq. 1-2, with the
squared Euclidean distance of Acar et al., ICML 2021, §2.

Shapes: N samples, S support samples, D embedding width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.task import Task

TINY = 1e-12
FAR = -1e9
"""Logit of a class without support samples: its probability and gradient are 0."""


def one_hot(y_N: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """[N, K]; a label outside the classes gives a row of zeros."""
    return (y_N[:, None] == torch.arange(classes, device=y_N.device)).to(dtype)


def cross_entropy(logits_NK: Tensor, y_N: Tensor) -> Tensor:
    """Mean of −log softmax(logits) at the labels."""
    chosen_NK = one_hot(y_N, logits_NK.shape[1], logits_NK.dtype)
    return -(torch.log_softmax(logits_NK, 1) * chosen_NK).sum(1).mean()


def known_cross_entropy(logits_NK: Tensor, y_N: Tensor) -> Tensor:
    """``cross_entropy`` over the samples whose label is one of the classes; 0 when none is. Exported graphs use
    ``cross_entropy``, which needs no count because their labels are checked."""
    return _over_chosen(torch.log_softmax(logits_NK, 1), one_hot(y_N, logits_NK.shape[1], logits_NK.dtype))


def of_task(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a task: (answers [N, K], what ``Layout.truths`` gives [N, K]) -> the mean of ``of_outputs`` over
    samples and outputs."""
    return lambda answers_NK, y_NK: of_outputs(task, answers_NK, y_NK).mean()


def known_of_task(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """``of_task`` over the truths that are not NaN; 0 when all are."""

    def loss(answers_NK: Tensor, y_NK: Tensor) -> Tensor:
        known_NK = ~torch.isnan(y_NK)
        loss_NK = of_outputs(task, answers_NK, torch.where(known_NK, y_NK, 0.0))
        return torch.where(known_NK, loss_NK, 0.0).sum() / known_NK.sum().clamp(min=1)

    return loss


def of_outputs(task: Task, answers_NK: Tensor, y_NK: Tensor) -> Tensor:
    """The loss of each output [N, K]: of labels the binary cross-entropy of a logit; of numbers e²/2, or Huber's
    function, which is |e| − 1/2 beyond 1 ("Robust Estimation of a Location Parameter", 1964), without a condition, so
    that graphs of its second derivative take any number of samples."""
    if isinstance(task, MultiLabel):
        return functional.softplus(answers_NK) - answers_NK * y_NK
    error_NK = answers_NK - y_NK
    near_NK = error_NK if task.loss == "squared" else error_NK.clamp(-1, 1)
    return near_NK * (error_NK - near_NK / 2)


def _over_chosen(log_NK: Tensor, chosen_NK: Tensor) -> Tensor:
    return -(log_NK * chosen_NK).sum() / chosen_NK.sum().clamp(min=1)


def prototypes(z_SD: Tensor, y_S: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Class means [K, D] and samples per class [K]; the mean of a class without samples is 0."""
    member_SK = one_hot(y_S, classes, z_SD.dtype)
    count_K = member_SK.sum(0)
    return member_SK.T @ z_SD / count_K.clamp(min=1)[:, None], count_K


def distances(z_ND: Tensor, other_MD: Tensor, kind: str = "squared") -> Tensor:
    """[N, M]: ``squared`` Euclidean distances (Acar, Snell) or ``norm``, the distances themselves (Lim)."""
    squared_NM = (z_ND[:, None] - other_MD).square().sum(2)
    return squared_NM if kind == "squared" else _root(squared_NM)


def proto_logits(z_ND: Tensor, proto_KD: Tensor, count_K: Tensor, kind: str = "squared") -> Tensor:
    """−d(z, c_k) [N, K], ``FAR`` for classes without samples."""
    return (-distances(z_ND, proto_KD, kind)).masked_fill(count_K == 0, FAR)


def proto_loss(
    z_SD: Tensor, y_S: Tensor, z_ND: Tensor, y_N: Tensor, classes: int, kind: str = "squared"
) -> Tensor:
    """Cross-entropy of softmax(−d(z, c_k)) over the query samples whose class is in the support; 0 without any."""
    proto_KD, count_K = prototypes(z_SD, y_S, classes)
    log_NK = torch.log_softmax(proto_logits(z_ND, proto_KD, count_K, kind), 1)
    return _over_chosen(log_NK, one_hot(y_N, classes, z_ND.dtype) * (count_K > 0))


def spread(z_ND: Tensor, y_N: Tensor, classes: int, kind: str, printed: bool) -> Tensor:
    """Mean distance between the centroids of different classes (Lim, eq. 3); 0 for a single class.

    printed: divides by (N − 1)² for N classes, as the paper prints it; otherwise by the N(N − 1) ordered pairs.
    """
    centroid_KD, count_K = prototypes(z_ND, y_N, classes)
    here_K = (count_K > 0).to(z_ND.dtype)
    pair_KK = here_K[:, None] * here_K * (1 - torch.eye(classes, dtype=z_ND.dtype, device=z_ND.device))
    number = here_K.sum()
    divisor = (number - 1) ** 2 if printed else number * (number - 1)
    return (distances(centroid_KD, centroid_KD, kind) * pair_KK).sum() / divisor.clamp(min=1)


def centroid_triplets(
    z_ND: Tensor, y_N: Tensor, classes: int, margin: Tensor, kind: str, *, total: bool, to_centroid: bool
) -> Tensor:
    """max(d(a_k, x_p) − d(x_p, x_n) + margin, 0) over all x_p of class k and x_n of other classes (Lim, eq. 4).

    total: returns the sum, as printed; otherwise the mean. to_centroid: uses d(a_k, x_n) instead of d(x_p, x_n), as the
    authors' program does.
    """
    centroid_KD, _ = prototypes(z_ND, y_N, classes)
    member_NK = one_hot(y_N, classes, z_ND.dtype)
    to_anchor_NK = distances(z_ND, centroid_KD, kind)
    positive_N = (to_anchor_NK * member_NK).sum(1)
    negative_NN = member_NK @ to_anchor_NK.T if to_centroid else distances(z_ND, z_ND, kind)
    other_NN = 1 - member_NK @ member_NK.T
    loss_NN = torch.relu(positive_N[:, None] - negative_NN + margin) * other_NN
    return loss_NN.sum() if total else loss_NN.sum() / other_NN.sum().clamp(min=1)


def pull(z_ND: Tensor, y_N: Tensor, mean_KD: Tensor, count_K: Tensor, *, square: bool = False) -> Tensor:
    """Σ_k ‖mean of class k in the batch − the fleet's‖ over classes that both have (Tan et al. 2022, eq. 8).

    square: the mean over samples and features of (z − the fleet's mean of the sample's class)² instead, where samples
    of a class that the fleet lacks count as 0 (the authors' program).
    """
    if square:
        member_NK = one_hot(y_N, len(count_K), z_ND.dtype) * (count_K > 0)
        return ((z_ND - member_NK @ mean_KD) * member_NK.sum(1, keepdim=True)).square().mean()
    own_KD, own_K = prototypes(z_ND, y_N, len(count_K))
    both_K = ((own_K > 0) & (count_K > 0)).to(z_ND.dtype)
    return (_root((own_KD - mean_KD).square().sum(1)) * both_K).sum()


def _root(squared: Tensor) -> Tensor:
    """The square root, with gradient 0 instead of infinity at 0."""
    return squared.clamp(min=TINY).sqrt()
