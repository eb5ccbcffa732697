"""Tensors of the Open Inference Protocol v2, as JSON and as the binary tensor data extension.

KServe, "Predict Protocol, Version 2": data row by row, nested or flat. Triton, "Binary Tensor Data Extension":
little-endian without padding, a BOOL as one byte, each BYTES element after its length as uint32. Deviations: text and
booleans are not converted to numbers, nor fractions to UINT8 or INT64; BYTES are UTF-8 text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from fleet_core.base.errors import MessageError
from fleet_core.data import model_input, prepare
from fleet_core.model.layout import InputSpec

MAX_SAMPLES = 4096
"""In one request."""

NUMPY = {"FP32": "<f4", "UINT8": "u1", "INT64": "<i8"}
OF_NUMPY = {"float32": "FP32", "uint8": "UINT8", "int64": "INT64"}

ABSENT = {
    "classification": "classification",
    "sequence_id": "sequence",
    "shared_memory_region": "shared memory",
}
"""Parameters of unsupported extensions. Ignoring them would change the meaning of an answer, so they are refused."""


@dataclass(frozen=True)
class Form:
    """The expected datatype and shape of one sample; a tensor holds one or more samples. spec: of the model's input;
    what becomes a sample by ``prepare`` is taken too."""

    datatype: str
    shape: tuple[int, ...] = ()
    spec: InputSpec | None = None

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether one sample may have this shape."""
        return tuple(shape) == self.shape or (self.spec is not None and prepare.takes(shape, self.spec))


def parameters_of(holder: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The ``parameters`` of a request or one of its tensors. Raises MessageError for those of absent extensions."""
    parameters = holder.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise MessageError("'parameters' is not an object", where=where)
    for name, extension in ABSENT.items():
        if name in parameters:
            raise MessageError(f"'{name}' is of the {extension} extension, which is not supported", where=where)
    return parameters


def flag(parameters: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    """A boolean parameter. Raises MessageError."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise MessageError(f"'{name}' is {shown(value)}", where=where, expected="true or false")
    return value


def shown(value: Any) -> str:
    """A wrong value of a request, shortened for an error message."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return "missing" if value is None else f"'{str(value)[:80]}'"


# Read -----------------------------------------------------------------------------------------------------------------


def read(inputs: Any, forms: Mapping[str, Form], binary: memoryview) -> dict[str, Any]:
    """{name: values} of a request's ``inputs``: one tensor of each form, all with the same number of samples n.

    values: array [n, *shape], or for BYTES n texts. binary: the bytes after the JSON. Raises MessageError.
    """
    if not isinstance(inputs, list):
        raise MessageError(f"'inputs' is {shown(inputs)}", expected=f"a list with {_listed(forms)}")
    read: dict[str, Any] = {}
    for tensor in inputs:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str) or name not in forms:
            raise MessageError(f"an input is named {shown(name)}", expected=_listed(forms))
        if name in read:
            raise MessageError(f"the input '{name}' comes twice")
        read[name], binary = _values(tensor, forms[name], binary, f"input '{name}'")
    if read.keys() != forms.keys():
        raise MessageError(f"the input {_listed(forms.keys() - read)} is missing")
    if len(binary):
        raise MessageError(f"{len(binary)} bytes follow the last input")
    if len({len(values) for values in read.values()}) > 1:
        raise MessageError("the inputs have different numbers of samples: "
                           + ' and '.join(f'{len(v)} of {name}' for name, v in read.items()))
    return read


def _listed(names: Any) -> str:
    return " and ".join(f"'{name}'" for name in sorted(names, reverse=True))


def _values(tensor: Mapping[str, Any], form: Form, binary: memoryview, where: str) -> tuple[Any, memoryview]:
    """(a tensor's values, the binary data after it)."""
    if tensor.get("datatype") != form.datatype:
        hint = model_input.BYTES if (tensor.get("datatype"), form.datatype) == ("UINT8", "FP32") else None
        raise MessageError(f"its datatype is {shown(tensor.get('datatype'))}", where=where, expected=form.datatype,
                           hint=hint)
    shape, size = _shape(tensor.get("shape"), form, where), parameters_of(tensor, where).get("binary_data_size")
    if size is None:
        return _from_json(tensor.get("data"), shape, form.datatype, where), binary
    if "data" in tensor or type(size) is not int or not 0 <= size <= len(binary):
        raise MessageError(
            f"'binary_data_size' is {shown(size)}", where=where,
            expected=f"at most {len(binary)}, the number of bytes after the JSON, and no 'data' besides",
        )
    return _from_binary(binary[:size], shape, form.datatype, where), binary[size:]


def _shape(shape: Any, form: Form, where: str) -> tuple[int, ...]:
    valid = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int for n in shape)
    if not valid or not form.takes(shape[1:]) or not shape or not 0 < shape[0] <= MAX_SAMPLES:
        axes = map(str, form.shape) if form.spec is None else prepare.described(form.spec)
        expected = ", ".join([f"1 to {MAX_SAMPLES}", *axes])
        raise MessageError(f"its shape is {shape if valid else 'no list of at most 8 integers'}", where=where,
                           expected=f"[{expected}]", hint=model_input.conversion(shape, form.shape) if valid else None)
    return tuple(shape)


def _from_json(data: Any, shape: tuple[int, ...], datatype: str, where: str) -> Any:
    values = _flat(data, shape, where)
    accepted: dict[str, set[type]] = {"BYTES": {str}, "FP32": {int, float}}
    if not set(map(type, values)) <= accepted.get(datatype, {int}):
        raise MessageError(f"its 'data' holds a value that is not {datatype}", where=where)
    if datatype == "BYTES":
        return values
    dtype = np.dtype(NUMPY[datatype])
    try:
        wide = np.array(values, np.float64 if datatype == "FP32" else np.int64)
    except OverflowError as error:
        raise MessageError(f"its 'data' holds a number out of the range of {datatype}", where=where) from error
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(dtype)
    if datatype != "FP32" and not np.array_equal(narrow, wide):
        raise MessageError(f"its 'data' holds a number out of the range of {datatype}", where=where)
    return _finite(narrow.reshape(shape), where)


def _flat(data: Any, shape: tuple[int, ...], where: str) -> list[Any]:
    """The values row by row, from nested or flat ``data``."""
    if not isinstance(data, list):
        raise MessageError(f"its 'data' is {shown(data)}", where=where, expected="a list")
    rows: list[Any] = data
    if len(shape) > 1 and data and isinstance(data[0], list):
        rows = [data]
        for length in shape:
            if not all(isinstance(row, list) and len(row) == length for row in rows):
                raise MessageError("the nesting of its 'data' differs from its shape", where=where)
            rows = list(chain.from_iterable(rows))
    if len(rows) != math.prod(shape):
        raise MessageError(f"{len(rows)} values in its 'data'", where=where, expected=str(math.prod(shape)))
    return rows


def _from_binary(data: memoryview, shape: tuple[int, ...], datatype: str, where: str) -> Any:
    if datatype == "BYTES":
        return _texts(data, shape[0], where)
    dtype = np.dtype(NUMPY[datatype])
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise MessageError(f"{len(data)} bytes of binary data", where=where,
                           expected=str(math.prod(shape) * dtype.itemsize))
    return _finite(np.frombuffer(data, dtype).astype(dtype.newbyteorder("=")).reshape(shape), where)


def _texts(data: memoryview, count: int, where: str) -> list[str]:
    texts, end = [], 0
    try:
        for _ in range(count):
            start = end + 4
            end = start + struct.unpack_from("<I", data, end)[0]
            texts.append(str(data[start:end], "utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise MessageError("its binary data is not UTF-8 texts, each after its length", where=where) from error
    if end != len(data):
        raise MessageError(f"{len(data)} bytes of binary data", where=where, expected=f"{end} for {count} texts")
    return texts


def _finite(values: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise MessageError("it holds a value that is not finite", where=where)
    return values


# Write ----------------------------------------------------------------------------------------------------------------


def write(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any], binary: bool) -> tuple[Any, bytes]:
    """(a response's output as JSON, the bytes that follow the JSON). values: row by row."""
    output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(shape)}
    if not binary:
        return {**output, "data": list(values)}, b""
    data = _as_binary(datatype, values)
    return {**output, "parameters": {"binary_data_size": len(data)}}, data


def _as_binary(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BOOL":
        return bytes(values)
    if datatype == "BYTES":
        texts = [text.encode() for text in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.array(values, NUMPY[datatype]).tobytes()
