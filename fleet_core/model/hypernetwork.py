"""A hypernetwork in numpy: it makes a model's weights from an embedding, and computes vector-Jacobian products.

Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021, Section 3 and
Algorithm 1: hidden layers with ReLU on the embedding v of a device, then one linear map for each array of its model.
Deviations: the last hidden layer is divided by the square root of its width, so that a step's length does not depend on
the width. The linear maps start with zero matrices and with the model's first weights as biases, so that every device
starts with the fleet's model.

Arrays are float64. E: width of an embedding. H: width of a hidden layer. P: values of one array of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_core.base.trees import Params

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
"""``hidden.0.weight`` [H, E], ``hidden.0.bias`` [H], …; and for an array ``body/conv1.weight`` of the model,
``body.conv1.weight.weight`` [P, H] and ``body.conv1.weight.bias`` [P]."""


def initial(model: Params, embedding: int, width: int, layers: int, rng: np.random.Generator) -> Weights:
    """Initial weights: hidden layers as in He et al. 2015; every embedding gives ``model``."""
    weights: Weights = {}
    for number, fan_in in enumerate([embedding] + [width] * (layers - 1)):
        weights[f"hidden.{number}.weight"] = rng.normal(0, np.sqrt(2 / fan_in), (width, fan_in))
        weights[f"hidden.{number}.bias"] = np.zeros(width)
    for group, name, array in _arrays(model):
        weights[f"{group}.{name}.weight"] = np.zeros((array.size, width))
        weights[f"{group}.{name}.bias"] = np.array(array, np.float64).reshape(-1)
    return weights


def generate(weights: Weights, v_E: Array, model: Params) -> dict[str, dict[str, Array]]:
    """The model's weights for the embedding ``v_E``, in the shapes of ``model``."""
    h_H = _hidden(weights, v_E)[-1] / np.sqrt(_width(weights))
    generated: dict[str, dict[str, Array]] = {}
    for group, name, array in _arrays(model):
        flat = weights[f"{group}.{name}.weight"] @ h_H + weights[f"{group}.{name}.bias"]
        generated.setdefault(group, {})[name] = flat.reshape(array.shape)
    return generated


def vector_jacobian(weights: Weights, v_E: Array, change: Params) -> tuple[Weights, Array]:
    """The vector-Jacobian products (∂θ/∂φ)ᵀ c and (∂θ/∂v)ᵀ c, for a change ``c`` of the generated weights θ."""
    layers, scale = _hidden(weights, v_E), 1 / np.sqrt(_width(weights))
    products: Weights = {}
    back_H = np.zeros(_width(weights))
    for group, name, array in _arrays(change):
        c_P = np.asarray(array, np.float64).reshape(-1)
        products[f"{group}.{name}.weight"] = np.outer(c_P, layers[-1] * scale)
        products[f"{group}.{name}.bias"] = c_P
        back_H = back_H + c_P @ weights[f"{group}.{name}.weight"] * scale
    for number in reversed(range(len(layers) - 1)):
        back_H = back_H * (layers[number + 1] > 0)
        products[f"hidden.{number}.weight"] = np.outer(back_H, layers[number])
        products[f"hidden.{number}.bias"] = back_H
        back_H = back_H @ weights[f"hidden.{number}.weight"]
    return {name: products[name] for name in weights}, back_H


def embedding(width: int, seed: tuple[int, ...]) -> Array:
    """A device's initial embedding [E], from N(0, 1)."""
    return np.random.default_rng(seed).normal(size=width)


def generator(model: Params) -> np.random.Generator:
    """A random generator seeded by the model's first weights, which in turn follow from the fleet's seed."""
    return np.random.default_rng(fingerprint(model))


def fingerprint(model: Params) -> int:
    """The CRC-32 of the model's float32 values."""
    import zlib

    crc = 0
    for _, _, array in _arrays(model):
        crc = zlib.crc32(np.ascontiguousarray(array, np.float32).tobytes(), crc)
    return crc


def _hidden(weights: Weights, v_E: Array) -> list[Array]:
    """The embedding and every hidden layer after its ReLU."""
    values, number = [np.asarray(v_E, np.float64)], 0
    while f"hidden.{number}.weight" in weights:
        h_H = weights[f"hidden.{number}.weight"] @ values[-1] + weights[f"hidden.{number}.bias"]
        values.append(np.maximum(h_H, 0))
        number += 1
    return values


def _width(weights: Weights) -> int:
    return len(weights["hidden.0.bias"])


def _arrays(model: Params) -> list[tuple[str, str, Any]]:
    return [(group, name, array) for group, named in model.items() for name, array in named.items()]
