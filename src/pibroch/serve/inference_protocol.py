"""Requests and answers of the Open Inference Protocol v2.

JSON, and the extension for binary tensors.

https://github.com/kserve/open-inference-protocol. In the extension a body is JSON, as long as a
header says, then the bytes of those tensors whose parameters say ``binary_data_size``, one behind
the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pibroch.serve.endpoints import JSON_TYPE, Reply
from pibroch.serve.settings import Refusal

JSON_LENGTH = "Inference-Header-Content-Length"
_KINDS = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_OTHER_ANSWERS = ("classification", "shared_memory_region")
"""Parameters of an output that ask for something else than its numbers, as Triton has them."""
_LENGTH_BYTES = 4
_MOST_DIMS = 8
_MOST_EMPTY = 1 << 20
"""Sizes of a shape, and their product without the zeros where it has some.

No bytes of a body stand for that one.
"""


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class _Wanted(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _InferenceRequest(msgspec.Struct):
    inputs: list[_Tensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Wanted] | None = None


_decoder = msgspec.json.Decoder(_InferenceRequest)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a client asks.

    Attributes:
        inputs: tensors by name; texts and bytes as object arrays of bytes.
        request_id: to be given back.
        outputs: names that are wanted, and whether each as bytes.
    """

    inputs: dict[str, NDArray[Any]]
    request_id: str | None
    outputs: dict[str, bool]


def parse_infer(body: bytes, json_length: str | None, outputs: Sequence[str]) -> InferRequest:
    """Read a request.

    Args:
        body: as it came.
        json_length: the header of the binary extension.
        outputs: names that may be asked for; the first is the usual one.

    Raises:
        Refusal: for what is no such request.
    """
    end = len(body)
    if json_length is not None:
        is_number = json_length.isascii() and json_length.isdigit() and len(json_length) < 12
        if not is_number or int(json_length) > end:
            got = f"got {JSON_LENGTH}: {json_length[:40]} of {end} bytes"
            raise Refusal(400, f"{got}; need the JSON's length in bytes")
        end = int(json_length)
    try:
        request = _decoder.decode(memoryview(body)[:end])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Refusal(400, f"got a body that is no inference request: {error}") from error
    inputs: dict[str, NDArray[Any]] = {}
    for tensor in request.inputs:
        if tensor.name in inputs:
            raise Refusal(400, f"got input `{tensor.name[:80]}` twice")
        size = _parameter(tensor.parameters, "binary_data_size")
        if size is None:
            inputs[tensor.name] = _of_json(tensor)
            continue
        if type(size) is not int or not 0 <= size <= len(body) - end or tensor.data is not None:
            got = f"got binary_data_size {str(size)[:40]} for `{tensor.name[:80]}`"
            raise Refusal(400, f"{got} with {len(body) - end} bytes left")
        inputs[tensor.name] = _of_bytes(tensor, body[end : end + size])
        end += size
    if end != len(body):
        raise Refusal(400, f"got {len(body) - end} bytes behind the last tensor")
    return InferRequest(inputs, request.id, _wanted(request, outputs))


def _parameter(parameters: Mapping[str, Any] | None, name: str, absent: object = None) -> Any:
    """An optional value; clients write null for one that is absent."""
    value = None if parameters is None else parameters.get(name)
    return absent if value is None else value


def _wanted(request: _InferenceRequest, names: Sequence[str]) -> dict[str, bool]:
    is_binary = _parameter(request.parameters, "binary_data_output") is True
    if not request.outputs:
        return {names[0]: is_binary}
    for output in request.outputs:
        if output.name not in names:
            raise Refusal(400, f"got output `{output.name[:80]}`; need one of {', '.join(names)}")
        for parameter in _OTHER_ANSWERS:
            if value := _parameter(output.parameters, parameter):
                got = f"got {parameter} {str(value)[:40]} for output `{output.name[:80]}`"
                raise Refusal(400, f"{got}; need none: its numbers are in the answer")
    return {
        output.name: _parameter(output.parameters, "binary_data", is_binary) is True
        for output in request.outputs
    }


def _shape_of(tensor: _Tensor) -> tuple[int, ...]:
    if (
        not 1 <= len(tensor.shape) <= _MOST_DIMS
        or any(size < 0 for size in tensor.shape)
        or (0 in tensor.shape and math.prod(size or 1 for size in tensor.shape) > _MOST_EMPTY)
    ):
        raise Refusal(
            400,
            f"got shape {str(tensor.shape)[:80]} for `{tensor.name[:80]}`; need one to {_MOST_DIMS}"
            f" sizes from 0 up, and besides a 0 a product of at most {_MOST_EMPTY:,}",
        )
    if tensor.datatype not in (*_KINDS, "BYTES"):
        got = f"got datatype {tensor.datatype[:40]} for `{tensor.name[:80]}`"
        raise Refusal(400, f"{got}; need BYTES or one of {', '.join(_KINDS)}")
    return tuple(tensor.shape)


def _of_json(tensor: _Tensor) -> NDArray[Any]:
    shape = _shape_of(tensor)
    if tensor.data is None:
        raise Refusal(400, f"got `{tensor.name[:80]}` without data")
    items = tensor.data
    for _ in shape[1:]:  # nested as deep as the shape, or flat
        if not items or not all(isinstance(item, list) for item in items):
            break
        items = [inner for item in items for inner in item]
    if len(items) != math.prod(shape):
        got = f"got {len(items)} items for `{tensor.name[:80]}`"
        raise Refusal(400, f"{got} of shape {list(shape)}")
    if tensor.datatype == "BYTES":
        if not all(type(item) is str for item in items):
            raise Refusal(400, f"got what is no text in `{tensor.name[:80]}`; need strings")
        try:
            return np.array([item.encode() for item in items], object).reshape(shape)
        except UnicodeError as error:
            got = f"got a text that is no UTF-8 in `{tensor.name[:80]}`"
            raise Refusal(400, f"{got}: {error}") from error
    kind = np.dtype(_KINDS[tensor.datatype]).kind
    allowed = {"b": (bool,), "f": (int, float)}.get(kind, (int,))
    if not all(type(item) in allowed for item in items):
        raise Refusal(400, f"got what is no {tensor.datatype} in `{tensor.name[:80]}`")
    try:
        with np.errstate(over="raise"):
            return np.array(items, _KINDS[tensor.datatype]).reshape(shape)
    except (OverflowError, ValueError, FloatingPointError) as error:
        got = f"got a number that is no {tensor.datatype} in `{tensor.name[:80]}`"
        raise Refusal(400, f"{got}: {error}") from error


def _of_bytes(tensor: _Tensor, data: bytes) -> NDArray[Any]:
    shape = _shape_of(tensor)
    if tensor.datatype == "BYTES":
        return np.array(_texts(data, tensor.name, math.prod(shape)), object).reshape(shape)
    kind = np.dtype(_KINDS[tensor.datatype]).newbyteorder("<")
    if len(data) != math.prod(shape) * kind.itemsize:
        got = f"got {len(data)} bytes for `{tensor.name[:80]}`"
        raise Refusal(400, f"{got}, {tensor.datatype} {list(shape)}")
    return np.frombuffer(data, kind).reshape(shape)


def _texts(data: bytes, name: str, count: int) -> list[bytes]:
    """Texts, each behind its length as a little-endian uint32."""
    values: list[bytes] = []
    at = 0
    while at < len(data) and len(values) < count:
        size = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        at += _LENGTH_BYTES
        values.append(data[at : at + size])
        at += size
    if at != len(data) or len(values) != count:
        got = f"got bytes for `{name[:80]}` that are not {count} texts"
        raise Refusal(400, f"{got}, each behind its length in four bytes")
    return values


def answer(
    name: str,
    version: str,
    request: InferRequest,
    outputs: Mapping[str, NDArray[Any]],
    parameters: Mapping[str, float],
) -> Reply:
    """An answer.

    Args:
        name: of the model.
        version: of it.
        request: that is answered.
        outputs: float32 or float64 ``[B, ...]`` by name.
        parameters: of the answer; left out where there are none.
    """
    tensors = []
    blobs = []
    for output, is_binary in request.outputs.items():
        values = outputs[output]
        kind = values.dtype.newbyteorder("<")
        datatype = f"FP{8 * kind.itemsize}"
        tensor: dict[str, Any] = {"name": output, "datatype": datatype, "shape": [*values.shape]}
        if is_binary:
            blobs.append(values.astype(kind).tobytes())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = values.ravel().tolist()
        tensors.append(tensor)
    content: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": tensors}
    if parameters:
        content["parameters"] = dict(parameters)
    if request.request_id is not None:
        content["id"] = request.request_id
    text = msgspec.json.encode(content)
    if not blobs:
        return Reply(text, (JSON_TYPE,))
    length = (JSON_LENGTH.lower().encode(), str(len(text)).encode())
    return Reply(b"".join([text, *blobs]), ((b"content-type", b"application/octet-stream"), length))
