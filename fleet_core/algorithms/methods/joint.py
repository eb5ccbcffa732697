"""FedAvg-joint: one model that serves every way to answer, because its loss has class means and a head.

It follows no paper. A step draws an episode as P-Avg (Proto) does (Acar et al., ICML 2021, §2), embeds its samples once
and lowers

    s · loss of class means (query, given the support) + (1 − s) · cross-entropy of the head (support and query).

The models are averaged as in FedAvg. A head alone shapes the body so that classes can be divided by planes, class means
so that they lie around their means; a device may choose either, or a mixture, after training.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet_core.algorithms.interface import weight


@dataclass(frozen=True, kw_only=True)
class Joint:
    """means_share: s, the weight of the loss of class means; the head's has the rest."""

    means_share: float = weight(0.5, most=1)
