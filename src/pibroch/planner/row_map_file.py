"""Homes of single rows on the disk: a safetensors file that is mapped, so that a host's processes share its memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pibroch.embedding.tensor_file import Stream, TensorFile, write_tensors
from pibroch.errors import CheckpointError, ConfigError
from pibroch.planner.row_map import RowMap

_TYPES = {"partition": np.uint16, "index": np.uint32, "home": np.uint16, "copies": np.bool_}
_SOURCE = "source"
_DO = "make the plan anew"


def write_row_map(path: Path, row_map: RowMap) -> None:
    """Write it, 6 bytes a row.

    Raises:
        OSError: when the disk refuses.
    """
    names = np.frombuffer(json.dumps(dict(row_map.num_rows)).encode(), np.uint8)
    arrays = {name: getattr(row_map, name) for name in _TYPES}
    if row_map.source is not None:
        arrays[_SOURCE] = row_map.source
    write_tensors(
        path,
        {"tables": Stream.of(names), **{name: Stream.of(array) for name, array in arrays.items()}},
    )


def open_row_map(path: Path) -> RowMap:
    """Map it, and look at every number once.

    Raises:
        ConfigError: when it is not there, or damaged.
    """
    try:
        with TensorFile(path) as file:
            num_rows = json.loads(bytes(file.mapped("tables")))
            arrays = {name: file.mapped(name) for name in _TYPES}
            source = file.mapped(_SOURCE) if _SOURCE in file.names else None
        found = RowMap(
            {str(name): int(count) for name, count in num_rows.items()}, **arrays, source=source
        )
        total = sum(found.num_rows.values())
        if source is not None and (source.dtype != np.uint16 or source.shape != found.copies.shape):
            raise ConfigError(
                f"{path}, whose sources are not those of its copies", "a whole file", _DO
            )
        wrong = [name for name, dtype in _TYPES.items() if arrays[name].dtype != dtype]
        if (
            wrong
            or arrays["copies"].ndim != 2
            or {arrays["partition"].shape, arrays["index"].shape} != {(total,)}
        ):
            raise ConfigError(
                f"{path}, which has other numbers than its {total:,} rows need", "a whole file", _DO
            )
    except (
        OSError,
        CheckpointError,
        ValueError,
        KeyError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise ConfigError(
            f"{path}, which cannot be read: {error}", "the file beside the plan", _DO
        ) from error
    found.check()
    return found
