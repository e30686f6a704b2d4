"""What a model takes: raw columns, or encoded tensors; named tensors become one or the other.

Shape legend: B samples, n dense features, F1 features with one id a sample, V ids of a multi-hot
feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.data.schema import Schema
from pibroch.errors import DataError
from pibroch.exchange.rows import is_one_hot
from pibroch.serve.predictor import Predictor
from pibroch.serve.raw_body import RawColumns
from pibroch.serve.settings import Refusal

DENSE = "dense"
IDS = "ids"
Work = RawColumns | JaggedBatch
"""What is scored: raw columns of B values, or a batch."""


def num_rows(work: Work) -> int:
    """B."""
    return work.batch_size if isinstance(work, JaggedBatch) else len(next(iter(work.values())))


def encoded_inputs(schema: Schema) -> list[dict[str, Any]]:
    """The tensors of encoded samples, as the protocol's metadata lists inputs; -1 is B, or V."""
    inputs: list[dict[str, Any]] = []
    if schema.dense:
        inputs.append({"name": DENSE, "datatype": "FP32", "shape": [-1, len(schema.dense)]})
    num_one_hot = sum(not feature.multi_hot for feature in schema.categorical)
    if num_one_hot:
        inputs.append({"name": IDS, "datatype": "INT64", "shape": [-1, num_one_hot]})
    for feature in schema.categorical:
        if feature.multi_hot:
            inputs += [
                {"name": f"{feature.name}.{part}", "datatype": "INT64", "shape": [-1]}
                for part in ("values", "lengths")
            ]
    return inputs


def encoded_tensors(schema: Schema, batch: JaggedBatch) -> dict[str, Tensor]:
    """The tensors of a batch by name, as :func:`encoded_inputs` lists them, in that order.

    Raises:
        DataError: for a batch without a feature, or without one id a sample where the schema says
            so.
    """
    batch = batch.select(schema.keys)
    bounds = batch.offsets[:: max(1, batch.batch_size)].tolist()
    lengths = batch.lengths().view(len(schema.keys), -1)
    tensors = {DENSE: batch.dense} if schema.dense else {}
    single = []
    of_bags = {}
    for number, feature in enumerate(schema.categorical):
        values = batch.values[bounds[number] : bounds[number + 1]]
        if feature.multi_hot:
            of_bags[f"{feature.name}.values"] = values
            of_bags[f"{feature.name}.lengths"] = lengths[number]
        elif bool((lengths[number] == 1).all()):
            single.append(values)
        else:
            raise DataError(f"a batch with bags of {feature.name!r}", "one id a sample")
    if single:
        tensors[IDS] = torch.stack(single, 1)
    return tensors | of_bags


def work_of(
    inputs: Mapping[str, NDArray[Any]], predictor: Predictor, needs_dense: bool = True
) -> Work:
    """Encoded samples where exactly their tensors are given, else raw columns.

    Args:
        inputs: tensors by name.
        predictor: that is to compute with them.
        needs_dense: whether ``dense`` has to be there; else it counts as zero where it is not.

    Raises:
        Refusal: for tensors that are neither.
    """
    encoded = [each["name"] for each in encoded_inputs(predictor.schema)]
    if set(inputs) in ([set(encoded)] if needs_dense else [set(encoded), {*encoded} - {DENSE}]):
        try:
            return _batch_of(inputs, predictor.schema)
        except DataError as error:
            raise Refusal(400, str(error)) from error
    ignored = predictor.schema.training_columns
    unknown = [name for name in inputs if name not in (*predictor.columns, *ignored)]
    missing = [name for name in predictor.columns if name not in inputs]
    if unknown or missing:
        wrong = f"unknown input `{unknown[0][:80]}`" if unknown else f"no input `{missing[0][:80]}`"
        need = (
            f"encoded samples ({', '.join(encoded)[:200]}) or raw columns"
            f" ({', '.join(predictor.columns)[:400]})"
        )
        raise Refusal(400, f"got {wrong}; need {need}")
    return {name: _raw_values(inputs[name], name) for name in predictor.columns}


def _raw_values(array: NDArray[Any], name: str) -> list[object]:
    if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        got = f"got shape {list(array.shape)} for column `{name[:80]}`"
        raise Refusal(400, f"{got}; need [B] or [B, 1]")
    return array.reshape(-1).tolist()


def _batch_of(inputs: Mapping[str, NDArray[Any]], schema: Schema) -> JaggedBatch:
    sizes = {name: len(array) for name, array in inputs.items() if not name.endswith(".values")}
    if len(set(sizes.values())) != 1:
        got = f"got inputs of {sorted(set(sizes.values()))[:9]} samples"
        raise Refusal(400, f"{got}; need one number")
    size = next(iter(sizes.values()))
    dense = np.zeros((size, len(schema.dense)), np.float32)
    if DENSE in inputs:
        dense = _typed(
            inputs[DENSE], DENSE, (np.float32, np.float64), (size, len(schema.dense))
        ).astype(np.float32)
        if not np.isfinite(dense).all():
            got = f"got what is no finite number in `{DENSE}`"
            raise Refusal(400, f"{got}; need what preparation makes of the values")
    one_hot = [feature.name for feature in schema.categorical if not feature.multi_hot]
    ids = np.empty((size, 0), np.int64)
    if one_hot:
        ids = _typed(inputs[IDS], IDS, (np.int64, np.int32), (size, len(one_hot))).astype(np.int64)
    values = []
    lengths = []
    place = 0
    for feature in schema.categorical:
        if feature.multi_hot:
            names = f"{feature.name}.values", f"{feature.name}.lengths"
            some, counts = (
                _typed(inputs[name], name, (np.int64, np.int32), None).astype(np.int64)
                for name in names
            )
            if (counts < 0).any() or (counts > len(some)).any() or counts.sum() != len(some):
                got = f"got `{names[1][:80]}` that do not sum"
                raise Refusal(400, f"{got} to the {len(some)} of `{names[0][:80]}`")
            values.append(some)
            lengths.append(counts)
        else:
            values.append(ids[:, place])
            lengths.append(np.ones(size, np.int64))
            place += 1
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return JaggedBatch(
        torch.from_numpy(dense),
        schema.keys,
        torch.from_numpy(np.ascontiguousarray(np.concatenate(values))),
        torch.from_numpy(offsets),
        torch.zeros(size),
    )


def _typed(
    array: NDArray[Any], name: str, kinds: Sequence[Any], shape: tuple[int, ...] | None
) -> NDArray[Any]:
    if array.dtype not in kinds or (array.shape != shape if shape else array.ndim != 1):
        got = f"got {array.dtype} {list(array.shape)} for `{name[:80]}`"
        types = " or ".join(str(np.dtype(kind)) for kind in kinds)
        raise Refusal(400, f"{got}; need {types} {list(shape) if shape else '[-1]'}")
    return array


def merged_columns(parts: Sequence[RawColumns]) -> RawColumns:
    """Raw samples of several requests, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def merged_batches(parts: Sequence[JaggedBatch]) -> JaggedBatch:
    """Samples of several requests in one batch; all have the same features in one order."""
    if len(parts) == 1:
        return parts[0]
    num_features = len(parts[0].keys)
    dense = torch.cat([part.dense for part in parts])
    if all(is_one_hot(part) for part in parts):
        ids = torch.cat([part.values.view(num_features, part.batch_size) for part in parts], 1)
        return JaggedBatch.from_one_hot(dense, parts[0].keys, ids, torch.zeros(len(dense)))
    lengths = [part.lengths().view(num_features, part.batch_size) for part in parts]
    features = torch.cat(
        [torch.repeat_interleave(torch.arange(num_features), each.sum(1)) for each in lengths]
    )
    order = torch.sort(features, stable=True).indices
    offsets = torch.zeros(sum(each.numel() for each in lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.cat(lengths, 1).view(-1), 0, out=offsets[1:])
    values = torch.cat([part.values for part in parts])[order]
    return JaggedBatch(dense, parts[0].keys, values, offsets, torch.zeros(len(dense)))
