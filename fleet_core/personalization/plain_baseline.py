"""A plain baseline: simple features and a simple classifier in numpy, with which a trained model is compared.

Features of one sample:

- a series [C, T]: mean, standard deviation, minimum, maximum and mean absolute step of each channel, and the logarithm
  of its magnitude spectrum, averaged over neighbouring frequencies;
- an image [C, H, W]: its pixels, averaged over squares;
- a row [F]: the row itself.

The features are standardized on the training samples. The classifier is the nearest class mean or softmax regression,
whichever has the better macro-F1 on every fourth training sample of each class after training on the others. Tokens
(int64) have no such features. Deterministic.

Shapes: S samples, F features, N classes, C channels, T time steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError, StateError
from fleet_core.data.samples import stratified
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]

NEAREST, LOGISTIC = "nearest mean", "logistic regression"
MAX_SAMPLES = 2000
"""The most training samples used; of more, about as many of each class are taken."""
MAX_FEATURES = 256
MAX_LOGISTIC_CLASSES = 64
"""With more classes softmax regression takes too long on a small board, and only the nearest mean is used."""
STATISTICS = 5  # per channel of a series
MAX_FREQUENCIES, MAX_SIDE = 128, 16
BATCH = 64
EVERY = 4  # every fourth sample of a class is held out to choose between the two classifiers


@dataclass(frozen=True, eq=False)
class Baseline:
    """mean, deviation: float64 [F], for standardization. classifier: takes standardized features."""

    mean: Array
    deviation: Array
    classifier: Prototypes | Head

    @classmethod
    def fit(cls, x: Array, y: Array, n_classes: int, name: str | None = None) -> Baseline:
        """Fits to raw samples x [S, *shape] with labels y int64 [S]. name: ``NEAREST`` or ``LOGISTIC``, by default the
        better one. Raises StateError without a sample, DataError for tokens, a label ≥ N or values that are not finite.
        """
        if not len(y):
            raise StateError("there is no labelled sample to fit a baseline to")
        rows = stratified(y, MAX_SAMPLES)
        features_SF, y = features(x[rows]), y[rows]
        if not np.isfinite(features_SF).all():
            raise DataError("a sample holds a value that is not finite")
        mean_F, deviation_F = moments(features_SF)
        z_SF = (features_SF - mean_F) / deviation_F
        fit = _better_fit(z_SF, y, n_classes) if name is None else FITS[name]
        return cls(mean_F, deviation_F, fit(z_SF, y, n_classes))

    @property
    def name(self) -> str:
        """``NEAREST`` or ``LOGISTIC``."""
        return NEAREST if isinstance(self.classifier, Prototypes) else LOGISTIC

    def labels(self, x: Array) -> Array:
        """The predicted labels int64 [S] of raw samples x [S, *shape]."""
        parts = [features(x[k : k + BATCH]) for k in range(0, len(x), BATCH)] or [np.zeros((0, len(self.mean)))]
        return np.concatenate([_answers(self.classifier, (part - self.mean) / self.deviation) for part in parts])


def applies_to(x: Array) -> bool:
    """Whether the baseline has features for raw samples x; it has none for tokens."""
    return bool(x.dtype != np.int64)


def described(name: str, shape: tuple[int, ...]) -> str:
    """The baseline in words, for samples of this shape, such as ``nearest mean on spectrum and statistics``."""
    return f"{name} on {({2: 'spectrum and statistics', 3: 'pixels'}).get(len(shape), 'the values')}"


def moments(features_SF: Array) -> tuple[Array, Array]:
    """(mean, deviation) of each feature, by which it is standardized; the deviation of a constant one is 1."""
    mean_F, deviation_F = features_SF.mean(0), features_SF.std(0)
    constant = deviation_F <= 1e-9 * np.maximum(1.0, np.abs(mean_F))
    return mean_F, np.where(constant, 1.0, deviation_F)


def features(x: Array) -> Array:
    """float64 [S, F] of raw samples x [S, *shape], F at most about ``MAX_FEATURES``. Raises DataError for tokens."""
    if not applies_to(x):
        raise DataError("tokens have no features for a plain baseline")
    of_shape = {3: _of_series, 4: _of_images}.get(x.ndim, _of_rows)
    parts = [of_shape(x[k : k + BATCH].astype(np.float64)) for k in range(0, max(1, len(x)), BATCH)]
    return np.concatenate(parts)


def _of_series(x_SCT: Array) -> Array:
    channels, length = x_SCT.shape[1:]
    steps_SC = np.abs(np.diff(x_SCT, axis=2)).mean(2) if length > 1 else np.zeros(x_SCT.shape[:2])
    statistics = [x_SCT.mean(2), x_SCT.std(2), x_SCT.min(2), x_SCT.max(2), steps_SC]
    bins = min(MAX_FREQUENCIES, max(4, MAX_FEATURES // channels - STATISTICS))
    spectrum_SCf = np.log1p(_averaged(np.abs(np.fft.rfft(x_SCT - x_SCT.mean(2, keepdims=True)))[..., 1:], 2, bins))
    flat = np.concatenate([*statistics, spectrum_SCf.reshape(len(x_SCT), -1)], axis=1)
    return _averaged(flat, 1, max(MAX_FEATURES, STATISTICS * channels))


def _of_images(x_SCHW: Array) -> Array:
    side = max(1, min(MAX_SIDE, math.isqrt(MAX_FEATURES // x_SCHW.shape[1])))
    small = _averaged(_averaged(x_SCHW, 2, side), 3, side)
    return _averaged(small.reshape(len(small), -1), 1, MAX_FEATURES)


def _of_rows(x: Array) -> Array:
    return _averaged(x.reshape(len(x), -1), 1, MAX_FEATURES)


def _averaged(x: Array, axis: int, bins: int) -> Array:
    """Averages neighbours along an axis to ``bins`` values; x itself when the axis is no longer than that."""
    length = x.shape[axis]
    if length <= bins:
        return x
    starts = np.arange(bins + 1) * length // bins
    shape = [1] * x.ndim
    shape[axis] = bins
    return np.asarray(np.add.reduceat(x, starts[:-1], axis=axis) / np.diff(starts).reshape(shape))


def _better_fit(z_SF: Array, y: Array, n_classes: int) -> Fit:
    """The classifier with the better macro-F1 on every fourth sample of each class."""
    held = np.zeros(len(y), bool)
    for label in np.unique(y):
        held[np.flatnonzero(y == label)[EVERY - 1 :: EVERY]] = True
    if len(np.unique(y)) > MAX_LOGISTIC_CLASSES or not held.any():
        return _nearest
    fits, scores = list(FITS.values()), []
    for fit in fits:
        counts = counted(y[held], _answers(fit(z_SF[~held], y[~held], n_classes), z_SF[held]), n_classes)
        scores.append(_macro_f1(counts))
    return fits[int(np.argmax(scores))]


def _nearest(z_SF: Array, y: Array, n_classes: int) -> Prototypes | Head:
    return Prototypes.empty(n_classes, z_SF.shape[1]).add(z_SF, y)


def _logistic(z_SF: Array, y: Array, n_classes: int) -> Prototypes | Head:
    return Head.fit(z_SF, y, n_classes)


Fit = Callable[[Array, Array, int], Prototypes | Head]
FITS: dict[str, Fit] = {NEAREST: _nearest, LOGISTIC: _logistic}


def _answers(classifier: Prototypes | Head, z_SF: Array) -> Array:
    z_SF = z_SF.astype(np.float32)
    parts = [classifier.probabilities(z_SF[k : k + BATCH]).argmax(1) for k in range(0, len(z_SF), BATCH)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def counted(y: Array, answers: Array, n_classes: int) -> Array:
    """Confusion counts int64 [N, N]: row = true class, column = answer."""
    counts_NN = np.zeros((n_classes, n_classes), np.int64)
    np.add.at(counts_NN, (y, answers), 1)
    return counts_NN


def _macro_f1(counts_NN: Array) -> float:
    truth_N, answers_N = counts_NN.sum(1), counts_NN.sum(0)
    f1_N = 2 * np.diagonal(counts_NN) / np.maximum(truth_N + answers_N, 1)
    return float(f1_N[truth_N > 0].mean())
