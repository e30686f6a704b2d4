"""Homes of single rows on the disk.

A safetensors file that is mapped, so that a host's processes share its memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import numpy as np
from pydantic import Field

from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Array
from pibroch.planner.row_map import RowMap
from pibroch.state.files import FileDigest, verify_file
from pibroch.state.tensor_file import TensorFile, write_tensors
from pibroch.untrusted import MAX_JSON_BYTES, Refusal, checked, parse_json

_TYPES = {"partition": np.uint16, "index": np.uint32, "home": np.uint16, "copies": np.bool_}
_SOURCE = "source"
_TABLES = "tables"
_NumRows = dict[str, Annotated[int, Field(strict=True, ge=1)]]
PLAN = Refusal(ConfigError, "make the plan anew")
"""How damaged plans are refused."""


def write_row_map(
    path: Path, row_map: RowMap, others: Mapping[str, Array] = MappingProxyType({})
) -> FileDigest:
    """Write it, 6 bytes a row.

    Args:
        path: of the file.
        row_map: homes of rows.
        others: arrays that lie in the same file, for :func:`open_array`.

    Raises:
        OSError: when the disk refuses.
    """
    names = np.frombuffer(json.dumps(dict(row_map.num_rows)).encode(), np.uint8)
    arrays = {name: getattr(row_map, name) for name in _TYPES}
    if row_map.source is not None:
        arrays[_SOURCE] = row_map.source
    return write_tensors(
        path,
        {_TABLES: names, **arrays, **others},
        unchecked=others,
    )


def open_array(path: Path, name: str) -> Array | None:
    """One of the ``others`` of :func:`write_row_map`, mapped; ``None`` where there is none.

    Raises:
        ConfigError: when the file is not there, or damaged.
    """
    with TensorFile(path.parent, path.name, PLAN) as file:
        return file.mapped(name) if name in file.names else None


def open_row_map(path: Path, digest: FileDigest | None = None) -> RowMap:
    """Map it, and look at every number once.

    Args:
        path: of the file.
        digest: that it must have; plans of before there was one do not say.

    Raises:
        ConfigError: when it is not there, or damaged.
    """
    folder = path.parent
    name = path.name
    if digest is not None:
        verify_file(folder, name, digest, PLAN)
    with TensorFile(folder, name, PLAN) as file:
        arrays = {name: file.mapped(name) for name in (_TABLES, *_TYPES)}
        source = file.mapped(_SOURCE) if _SOURCE in file.names else None
    tables = arrays.pop(_TABLES)
    if tables.dtype != np.uint8 or tables.ndim != 1 or tables.nbytes > MAX_JSON_BYTES:
        raise PLAN(f"`tables` {tables.dtype} {list(tables.shape)} in {path}", "JSON in uint8")
    where = f"`tables` in {path}"
    num_rows = checked(_NumRows, parse_json(bytes(tables), where, PLAN), where, PLAN)
    total = sum(num_rows.values())
    num_partitions = arrays["home"].shape
    shape = arrays["copies"].shape
    shapes = {
        "partition": (total,),
        "index": (total,),
        "home": num_partitions[:1],
        "copies": (*num_partitions[:1], *shape[1:2]),
        _SOURCE: shape,
    }
    for name, array in {**arrays, **({} if source is None else {_SOURCE: source})}.items():
        dtype = _TYPES.get(name, np.uint16)
        if array.dtype != dtype or array.shape != shapes[name]:
            need = f"{np.dtype(dtype)} {list(shapes[name])}"
            raise PLAN(f"{name!r} {array.dtype} {list(array.shape)} in {path}", need)
    if arrays["copies"].size and arrays["copies"].view(np.uint8).max() > 1:
        raise PLAN(f"'copies' in {path} with bytes that are no truth values", "0 and 1")
    if source is not None and source.size and source.max() >= shape[1]:
        raise PLAN(f"'source' {source.max()} in {path}", f"one of {shape[1]} shards")
    row_map = RowMap(num_rows, **arrays, source=source)
    row_map.check()
    return row_map
