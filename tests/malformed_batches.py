"""Batches made by hand, most of them wrong, through the kernels.

For a process of their own, which a kernel may crash.
"""

import math
import os
import random
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pibroch as pb
from pibroch.data import JaggedBatch
from pibroch.errors import DataError

NUM_EXAMPLES = 1000
ROWS = {"a": 9, "b": 5, "c": 1}
TABLES = [pb.Table("a", 9, 4), pb.Table("b", 5, 4, pooling="mean"), pb.Table("c", 1, 4)]
ANY_INT64 = (
    st.integers(-(2**63), 2**63 - 1)
    | st.integers(-3, 70)
    | st.sampled_from([-(2**63), 2**63 - 1, 2**62, 2**31])
)
Parts = dict[str, Any]


def sound_parts(draw: Callable[[Any], Any]) -> Parts:
    """The fields of a batch that is right."""
    keys = draw(
        st.sampled_from(
            [("a",), ("a", "b"), ("a", "b", "c"), ("c", "b", "a"), ("b", "a", "unknown")]
        )
    )
    size = draw(st.integers(0, 4))
    lengths = draw(
        st.lists(st.integers(0, 3), min_size=len(keys) * size, max_size=len(keys) * size)
    )
    owners = [
        key
        for bag, key in enumerate(key for key in keys for _ in range(size))
        for _ in range(lengths[bag])
    ]
    numbers = random.Random(draw(st.integers(0, 99)))
    values = [numbers.randrange(ROWS.get(key, 1)) for key in owners]
    weights = torch.tensor([numbers.gauss(0, 2) for _ in values]) if draw(st.booleans()) else None
    return {
        "dense": torch.zeros(size, 2),
        "keys": keys,
        "values": torch.tensor(values, dtype=torch.int64),
        "offsets": torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        "labels": torch.zeros(size),
        "weights": None if weights is None else weights.reshape(len(values)).float(),
    }


def write(parts: Parts, draw: Callable[[Any], Any]) -> None:
    """Write a number to one of the tensors."""
    tensor = parts[draw(st.sampled_from(["offsets", "offsets", "values", "weights"]))]
    if tensor is not None and len(tensor):
        number = draw(
            ANY_INT64
            if tensor.dtype == torch.int64
            else st.sampled_from([math.nan, math.inf, -math.inf, 2.5])
        )
        tensor[draw(st.integers(0, len(tensor) - 1))] = number


def change(parts: Parts, draw: Callable[[Any], Any]) -> None:
    """Do to one field what a program may get wrong; now and then that leaves it right."""
    if draw(st.booleans()):
        return write(parts, draw)
    name = draw(
        st.sampled_from(["offsets", "offsets", "values", "weights", "labels", "dense", "keys"])
    )
    if name == "keys":
        keys = parts["keys"]
        parts["keys"] = draw(
            st.sampled_from(
                [(*keys, "d"), keys[:-1], (keys[0], *keys), keys + keys, "ab", None, ()]
            )
        )
        return None
    tensor = parts[name]
    if tensor is None:
        tensor = torch.ones(len(parts["values"]))
    how = draw(st.sampled_from(["shorter", "longer", "type", "shape", "nothing", "every second"]))
    if how == "shorter":
        tensor = tensor[: draw(st.integers(0, len(tensor)))]
    elif how == "longer":
        more = [draw(st.integers(0, 80)) for _ in range(draw(st.integers(1, 3)))]
        added = torch.tensor(more).to(tensor.dtype).reshape(-1, *[1] * (tensor.ndim - 1))
        tensor = torch.cat([tensor, added.expand(-1, *tensor.shape[1:])])
    elif how == "type":
        tensor = tensor.to(
            draw(
                st.sampled_from(
                    [torch.float32, torch.int32, torch.float64, torch.bool, torch.complex64]
                )
            )
        )
    elif how == "shape":
        tensor = draw(
            st.sampled_from([tensor[None], tensor.reshape(-1, 1), tensor.sum(), tensor.flatten()])
        )
    elif how == "nothing":
        tensor = draw(st.sampled_from([None, tensor.tolist(), tensor.numpy()]))
    elif how == "every second":
        tensor = torch.stack([tensor, tensor + 7], -1)[..., 0]
    parts[name] = tensor


def is_sound(parts: Parts) -> bool:
    """What a batch has to be, one number at a time."""
    dense, keys, values, offsets, labels, weights = (
        parts[field.name] for field in fields(JaggedBatch)[:6]
    )
    if not all(isinstance(part, torch.Tensor) for part in (dense, values, offsets, labels)):
        return False
    if not isinstance(keys, tuple) or not keys or len(set(keys)) < len(keys):
        return False
    size = labels.shape[0] if labels.ndim in (1, 2) else -1
    shapes = dense.ndim == 2 and len(dense) == size and values.ndim == 1 and offsets.ndim == 1
    types = dense.dtype == torch.float32 and values.dtype == offsets.dtype == torch.int64
    if not (shapes and types and len(offsets) == len(keys) * size + 1):
        return False
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] != len(values) or sorted(ends) != ends:
        return False
    for bag in range(len(keys) * size):
        key = keys[bag // size]
        if key in ROWS and not all(
            0 <= id_ < ROWS[key] for id_ in values[ends[bag] : ends[bag + 1]].tolist()
        ):
            return False
    if weights is None:
        return set(keys) & set(ROWS) != set()
    if (
        not isinstance(weights, torch.Tensor)
        or not weights.is_floating_point()
        or weights.shape != values.shape
    ):
        return False
    return bool(weights.float().isfinite().all()) and set(keys) & set(ROWS) != set()


def pooled(parts: Parts, weights_of: dict[str, torch.Tensor]) -> torch.Tensor:
    """What comes out for a sound batch, one id at a time."""
    size = len(parts["labels"])
    ends = parts["offsets"].tolist()
    out = torch.zeros(size, len(TABLES), 4)
    for place, table in enumerate(TABLES):
        if table.name not in parts["keys"]:
            continue
        for sample in range(size):
            bag = parts["keys"].index(table.name) * size + sample
            for position in range(ends[bag], ends[bag + 1]):
                factor = 1.0 if parts["weights"] is None else float(parts["weights"][position])
                factor /= ends[bag + 1] - ends[bag] if table.pooling == "mean" else 1
                out[sample, place] += (
                    factor * weights_of[table.name][int(parts["values"][position])]
                )
    return out


def run(folder: Path) -> None:
    """Run the examples; those that failed are in ``folder/failed``.

    The last one begins ``folder/last`` when it crashed.
    """
    torch.set_num_threads(1)
    embeddings = pb.Embeddings(TABLES, pb.SGD(lr=1e-30))
    counts = {True: 0, False: 0}
    descriptor = os.open(folder / "last", os.O_WRONLY | os.O_CREAT)

    @settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def example(data: st.DataObject) -> None:
        parts = sound_parts(data.draw)
        made = JaggedBatch(**parts)
        if written := data.draw(st.booleans()):
            write(parts, data.draw)  # to the tensors of a batch that was right when it was made
        else:
            change(parts, data.draw)
        last = repr(
            {
                name: part.tolist() if isinstance(part, torch.Tensor) else part
                for name, part in parts.items()
            }
        )
        os.pwrite(descriptor, last.encode() + b"\n" * 1000, 0)
        sound = is_sound(parts)
        counts[sound] += 1
        try:
            result = embeddings(made if written else JaggedBatch(**parts))
        except DataError:
            assert not sound, parts
            return
        assert sound, parts
        result.sum().backward()
        tables = {
            table.name: torch.from_numpy(embeddings.shard.weights(table.name)) for table in TABLES
        }
        torch.testing.assert_close(result.detach(), pooled(parts, tables))

    try:
        example()
        (folder / "done").write_text(f"{counts[True]} {counts[False]}")
    except BaseException:
        (folder / "failed").write_text(traceback.format_exc())
