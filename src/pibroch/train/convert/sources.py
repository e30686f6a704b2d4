"""What others wrote: a file of ``torch.save``, one such file of each rank, or a folder of DCP.

Reading it runs no code.

``torch.load`` reads with ``weights_only=True``. DCP keeps its index as a pickle, of which only its
own classes are let through.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.remote_device import _remote_device

from pibroch.errors import CheckpointError

_INDEX = ".metadata"
_FILES = ("*.pt", "*.pth", "*.bin")
_FROM_INDEX = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_TABLE = "embedding_bags."
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError)


def read_source(source: Path) -> dict[str, Tensor]:
    """All tensors by name, with dots between the keys of nested dictionaries.

    State that optimizers keep of tables is left out.

    Args:
        source: a file of ``torch.save``, a folder with one of each rank, or a folder of
            ``torch.distributed.checkpoint``.

    Raises:
        CheckpointError: when it is none of these, or of some ranks alone.
    """
    if (source / _INDEX).is_file():
        return _read_dcp(source)
    paths = [source]
    if source.is_dir():
        paths = sorted(path for pattern in _FILES for path in source.glob(pattern))
    if not paths:
        raise CheckpointError(
            f"{source}, a folder without {_INDEX} and {', '.join(_FILES)}",
            "a folder of torch.distributed.checkpoint, or of files that torch.save wrote, one of"
            " each rank",
        )
    tensors: dict[str, Tensor] = {}
    sharded: dict[str, list[_Sharded]] = {}
    for path in paths:
        for name, value in _flat(_load(path), ""):
            if isinstance(value, _Sharded):
                sharded.setdefault(name, []).append(value)
            elif _is_wanted(name):
                tensors[name] = value
    return tensors | {
        name: _joined(name, parts) for name, parts in sharded.items() if _is_wanted(name)
    }


def _is_wanted(name: str) -> bool:
    return _TABLE not in name or name.endswith(".weight")


def _flat(value: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | _Sharded):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))


def _load(source: Path) -> Mapping[str, Any]:
    known: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (_Sharded, "torch.distributed._shard.sharded_tensor.api.ShardedTensor"),
        (
            _RanksOfShard,
            "torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState",
        ),
        (_attribute, "builtins.getattr"),
        (_attribute, "__builtin__.getattr"),
        _RanksOfShard,
        Shard,
        ShardMetadata,
        ShardedTensorMetadata,
        TensorProperties,
        MEM_FORMAT_ENCODING,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        _remote_device,
    ]
    try:
        with torch.serialization.safe_globals(known):
            content = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"no {source}", "a file that torch.save wrote") from error
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{source}, which is no file of tensors: {_reason(error)}",
            "a state_dict of tensors alone, written by torch.save",
            "save model.state_dict() instead of the model",
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"a {type(content).__name__} in {source}", "a state_dict", "save model.state_dict()"
        )
    return content


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _RanksOfShard(tuple[Any, ...]):
    """In place of ``ShardedTensor.ProcessGroupState``: which ranks saved; nobody asks."""

    def __new__(cls, *ranks: object) -> _RanksOfShard:
        return super().__new__(cls, ranks)


class _Sharded(Tensor):
    """In place of a ``ShardedTensor``, which could be loaded in a process group like its own alone.

    One rank's shards.
    """

    ProcessGroupState = _RanksOfShard
    shards: Sequence[Shard]
    metadata: ShardedTensorMetadata

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> Any:
        # torch asks that there is such a method
        raise NotImplementedError("it has no numbers of its own")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.shards = state[0]
        self.metadata = state[1]


def _attribute(owner: object, name: str) -> object:
    """In place of ``getattr``, by which pickle finds a class inside another one."""
    if owner is not _Sharded or name != "ProcessGroupState":
        raise pickle.UnpicklingError(f"attribute {name!r} of something")
    return _RanksOfShard


def _joined(name: str, parts: Sequence[_Sharded]) -> Tensor:
    """The whole tensor from all ranks' shards."""
    shards = [shard for part in parts for shard in part.shards]
    size = list(parts[0].metadata.size)
    cells = sum(shard.tensor.numel() for shard in shards)
    if (
        not shards
        or cells != math.prod(size)
        or any(list(part.metadata.size) != size for part in parts)
    ):
        raise CheckpointError(
            f"{cells:,} of the {math.prod(size):,} numbers of {name!r}, which was cut over ranks",
            "all of them",
            "name a folder with the file of each rank, or one that torch.distributed.checkpoint"
            " wrote",
        )
    whole = torch.empty(size, dtype=shards[0].tensor.dtype)
    for shard in shards:
        offsets = shard.metadata.shard_offsets
        here = tuple(
            slice(first, first + n)
            for first, n in zip(offsets, shard.metadata.shard_sizes, strict=True)
        )
        whole[here] = shard.tensor
    return whole


def _read_dcp(folder: Path) -> dict[str, Tensor]:
    reader = _SafeReader(folder)
    try:
        index = reader.read_metadata()
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and _is_wanted(name)
        }
        load(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, *_UNREADABLE) as error:
        raise CheckpointError(
            f"{folder}, which cannot be read: {_reason(error)}",
            "an undamaged folder of torch.distributed.checkpoint",
            "use another one, or convert it by"
            " torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
        ) from error
    return tensors


class _SafeReader(FileSystemReader):
    """Reads the index with :class:`_IndexUnpickler`.

    Of the rest only tensors are asked for, each with ``weights_only``.
    """

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        index = _IndexUnpickler(io.BytesIO((Path(self.path) / _INDEX).read_bytes())).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"an index that is a {type(index).__name__}")
        return index


class _IndexUnpickler(pickle.Unpickler):
    """Makes DCP's own classes, sizes and types, and nothing else."""

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("pathlib", "pathlib._local"):  # where the folder lay, which nobody asks
            return PurePosixPath
        resolved = None if "." in name else super().find_class(module, name)
        is_class = (
            isinstance(resolved, type) and module in _FROM_INDEX and resolved.__module__ == module
        )
        if is_class or resolved is torch.Size or isinstance(resolved, torch.dtype):
            return resolved
        raise pickle.UnpicklingError(
            f"an index with {module}.{name} in it, which is no part of one"
        )
