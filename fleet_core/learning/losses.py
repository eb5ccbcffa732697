"""Losses, written without ``F.cross_entropy``, whose traced gradient an exported graph multiplies by the batch size.

Prototypes: Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017, eq. 1-2, with the
squared Euclidean distance of Acar et al., ICML 2021, §2.

Shapes: N samples, S support samples, D embedding width, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAR = -1e9
"""Logit of a class that the support lacks: its probability is 0 and no gradient passes."""


def one_hot(y_N: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """[N, K]; a label outside the classes gives a row of zeros."""
    return (y_N[:, None] == torch.arange(classes)).to(dtype)


def cross_entropy(logits_NK: Tensor, y_N: Tensor) -> Tensor:
    """Mean of −log softmax(logits) at the labels."""
    chosen_NK = one_hot(y_N, logits_NK.shape[1], logits_NK.dtype)
    return -(torch.log_softmax(logits_NK, 1) * chosen_NK).sum(1).mean()


def prototypes(z_SD: Tensor, y_S: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Class means [K, D] and the number of samples [K] behind each; the mean of a class without samples is 0."""
    member_SK = one_hot(y_S, classes, z_SD.dtype)
    count_K = member_SK.sum(0)
    return member_SK.T @ z_SD / count_K.clamp(min=1)[:, None], count_K


def proto_logits(z_ND: Tensor, proto_KD: Tensor, count_K: Tensor) -> Tensor:
    """−‖z − c_k‖² [N, K], ``FAR`` for classes without samples."""
    distance_NK = (z_ND[:, None] - proto_KD).square().sum(2)
    return (-distance_NK).masked_fill(count_K == 0, FAR)


def proto_loss(z_SD: Tensor, y_S: Tensor, z_ND: Tensor, y_N: Tensor, classes: int) -> Tensor:
    """Cross-entropy of softmax(−‖z − c_k‖²) over the query samples whose class the support has; 0 when none is left."""
    proto_KD, count_K = prototypes(z_SD, y_S, classes)
    log_NK = torch.log_softmax(proto_logits(z_ND, proto_KD, count_K), 1)
    chosen_NK = one_hot(y_N, classes, z_ND.dtype) * (count_K > 0)
    return -(log_NK * chosen_NK).sum() / chosen_NK.sum().clamp(min=1)
