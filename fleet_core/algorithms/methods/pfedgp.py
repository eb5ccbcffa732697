"""pFedGP: the fleet trains a representation; each device classifies on it by Gaussian processes of its own samples.

Achituve, Shamsian, Navon, Chechik, Fetaya, "Personalized Federated Learning with Gaussian Processes", NeurIPS 2021,
Section 4: a kernel on the representation is shared and averaged as in FedAvg; a device's classes are the leaves of a
binary tree, with a Gaussian process and a Pólya-Gamma augmentation (Polson, Scott, Windle 2013) in every node. A step's
loss is the predictive likelihood of the query given the support, with fixed augmentation variables.

Deviations: those variables are not sampled (the paper: Gibbs), so that answers are deterministic. They are set to their
means under the best factorised posterior, by a fixed number of its closed-form updates (Wenzel et al., "Efficient
Gaussian Process Classification Using Pólya-Gamma Data Augmentation", AAAI 2019, without inducing points). The tree
divides the class means by the sign of their projection on their first principal direction (Boley 1998); the paper
clusters them by k-means. The kernel's parameters are hyper-parameters. Inducing points are not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fleet_core.algorithms.interface import count, one_of, positive

KERNELS = ("rbf", "linear")


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """kernel: on representations, ``rbf``: s exp(−‖z − z'‖² / 2ℓ²), or ``linear``: s ⟨z, z'⟩ / ℓ². output_scale: s.
    length_scale: ℓ. augmentation_steps: updates of the augmentation's variables."""

    kernel: str = one_of("rbf", KERNELS)
    output_scale: float = positive(8.0)
    length_scale: float = positive(1.0)
    augmentation_steps: int = count(10, most=1000)


def gaussian_of(hyper: Gaussian) -> Gaussian:
    """The ``Gaussian`` part of a method's hyper-parameters."""
    return Gaussian(**{field.name: getattr(hyper, field.name) for field in fields(Gaussian)})
