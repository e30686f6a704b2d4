"""Everything of a checkpoint but the tables: dense layers, their optimizer, random state.

Rank 0 writes it. It has all but what belongs to other groups of ranks, whose first ranks send it
that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from pibroch.collectives import Channel
from pibroch.collectives.ownership import Parts, all_parts, is_within, own_parts
from pibroch.embedding.row_index import load_state, state_of
from pibroch.errors import CheckpointError
from pibroch.state.files import CHECKPOINT, FileDigest
from pibroch.state.optimizer_state import encode_optimizer, load_optimizer
from pibroch.state.tensor_file import Stream, load_tensors, write_tensors
from pibroch.state.trained import TablesOfRanks, Trained

WEIGHTS = "dense.safetensors"
OPTIMIZER = "dense_optimizer.safetensors"
AVERAGES = "dense_average.safetensors"
RANDOM = "random.safetensors"
ROW_INDICES = "row_indices.safetensors"
WINDOWS = "windows.safetensors"
_AVERAGED = "module."  # what torch's averages put before each name

_BY_BYTES = {
    torch.bfloat16: (torch.int16, "BF16"),
    torch.float8_e4m3fn: (torch.uint8, "F8_E4M3"),
    torch.float8_e5m2: (torch.uint8, "F8_E5M2"),
}

_NUM_WORDS = 624
_TWISTER = struct.Struct("<QiiQ")  # seed, numbers left, whether it is seeded, the next one's place
_NORMALS = struct.Struct("<dddi")
_FLAGS = struct.Struct("<fB")
_RANDOM_BYTES = _TWISTER.size + 8 * _NUM_WORDS + _NORMALS.size + 4 + 8
"""Of torch's state on the CPU: Mersenne twister, normal numbers kept back, whether there are some.
"""

T = TypeVar("T")
DenseState = dict[str, dict[str, Tensor]]
"""Tensors by file and name."""
ReadTensors = Callable[[str], Mapping[str, Tensor]]
"""Gives the tensors of a file by name."""


def gather_session(session: Trained, channel: Channel) -> DenseState:
    """All of a session that :func:`save_dense` is to write, as :func:`gather_dense`."""
    parts = all_parts(session.model)
    averages = {_AVERAGED + part: members for part, members in parts.items()}
    return gather_dense(
        channel,
        lambda: _dense_state(session),
        {WEIGHTS: parts, OPTIMIZER: parts, AVERAGES: averages},
    )


def gather_weights(session: Trained, channel: Channel) -> dict[str, Tensor]:
    """The dense layers' weights and buffers, on rank 0; nothing on the others.

    Otherwise as :func:`gather_dense`.
    """
    held = {WEIGHTS: all_parts(session.model)}
    return gather_dense(channel, lambda: {WEIGHTS: session.model.state_dict()}, held).get(
        WEIGHTS, {}
    )


def gather_dense(
    channel: Channel, make: Callable[[], DenseState], held: Mapping[str, Parts]
) -> DenseState:
    """All that :func:`save_dense` is to write, on rank 0; nothing on the others.

    Every rank calls it.

    Sends only what belongs to groups of ranks. Blocks until it has come.

    Args:
        channel: between the ranks.
        make: this rank's tensors.
        held: of files, which parts belong to groups of ranks.

    Raises:
        RankFailedError: when a rank was lost.
    """
    is_first = channel.ranks.rank == 0
    if not any(held.values()):
        return make() if is_first else {}
    state = make()
    own: DenseState = {}
    if not is_first:
        own = {file: led(channel, each, held.get(file, {})) for file, each in state.items()}
    for sent in send_to_first(channel, own):
        for file, tensors in sent.items():
            state[file] |= tensors
    return state if is_first else {}


def led(channel: Channel, named: Mapping[str, T], parts: Parts) -> dict[str, T]:
    """What belongs to groups of which this rank is the first."""
    led = [part for part, members in parts.items() if min(members) == channel.ranks.rank_in_run]
    return {name: value for name, value in named.items() if is_within(name, led)}


def save_dense(
    folder: Path, state: DenseState, unchecked: Mapping[str, Collection[str]] | None = None
) -> dict[str, FileDigest]:
    """Write the files into a checkpoint; returns their digests.

    Args:
        folder: the checkpoint.
        state: what to write.
        unchecked: of files, the tensors that may have infinite numbers, such as masks.

    Raises:
        TrainingError: when a parameter is NaN or infinite.
        OSError: when the disk refuses.
    """
    free = unchecked or {}
    return {
        name: write_tensors(
            folder / name,
            {key: _stream(tensor) for key, tensor in tensors.items()},
            free.get(name, ()),
        )
        for name, tensors in state.items()
    }


def tensors_in(folder: Path) -> ReadTensors:
    """What gives the tensors of a checkpoint's files."""
    return lambda file: load_tensors(folder, file)


def row_indices_state(embeddings: TablesOfRanks) -> DenseState:
    """The file of the tables' row indices; none where no index has a state."""
    state = state_of(embeddings.row_indices)
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    return {ROW_INDICES: tensors} if tensors else {}


def load_row_indices(read: ReadTensors, embeddings: TablesOfRanks) -> None:
    """Bring the tables' row indices to where they were saved.

    Raises:
        CheckpointError: when something is missing or of another shape.
    """
    indices = embeddings.row_indices
    if state_of(indices):
        load_state(indices, {name: each.numpy() for name, each in read(ROW_INDICES).items()})


def load_dense_weights(read: ReadTensors, session: Trained) -> None:
    """Load what this rank holds of the model, and of its averages where the session keeps them.

    Args:
        read: gives the tensors of a file.
        session: takes them.

    Raises:
        CheckpointError: when they are not the session's.
    """
    try:
        session.model.load_state_dict(_own(read, WEIGHTS, session))
        if session.averages is not None:
            session.averages.load_state_dict(_own(read, AVERAGES, session))
    except RuntimeError as error:
        raise CheckpointError(
            f"dense layers that are not those of this run: {str(error).splitlines()[-1].strip()}",
            "a checkpoint of this model, of this version of pibroch",
            "resume with the model and the version that wrote it, or start anew",
        ) from error


def load_dense_optimizer(read: ReadTensors, session: Trained) -> None:
    """Load what this rank holds of the dense optimizer's state, and the random state."""
    names = [name for name, _ in session.model.named_parameters()]
    load_optimizer(session.optimizer, names, _own(read, OPTIMIZER, session), None)
    set_random_state(read(RANDOM), "torch")


def set_random_state(states: Mapping[str, Tensor], name: str) -> None:
    """Set torch's random state to one of a file, once it is known to be one.

    Torch itself takes a Mersenne twister whose position would be counted beyond its numbers, and
    then reads there.

    Raises:
        CheckpointError: when it is none.
    """
    state = states.get(name)
    need = f"a state of torch's generator, uint8 [{_RANDOM_BYTES}]"
    if state is None or state.dtype != torch.uint8 or state.shape != (_RANDOM_BYTES,):
        got = "absent" if state is None else f"{state.dtype} {list(state.shape)}"
        raise CHECKPOINT(f"{name!r} in {RANDOM}, {got}", need)
    data = state.numpy().tobytes()
    _, left, seeded, after = _TWISTER.unpack_from(data)
    words = np.frombuffer(data, "<u8", _NUM_WORDS, _TWISTER.size)
    normals = _NORMALS.unpack_from(data, _TWISTER.size + words.nbytes)
    flags = _FLAGS.unpack_from(data, _RANDOM_BYTES - 8)
    is_at_start = (left, after) == (1, 0)
    if not (
        seeded == 1
        and (is_at_start or (1 <= left <= _NUM_WORDS and left + after == _NUM_WORDS + 1))
        and int(words.max()) < 1 << 32
        and np.isfinite([*normals[:3], flags[0]]).all()
        and normals[3] in (0, 1)
        and flags[1] in (0, 1)
    ):
        raise CHECKPOINT(f"{name!r} in {RANDOM} with numbers that no generator has", need)
    torch.set_rng_state(state)


def _dense_state(session: Trained) -> DenseState:
    averages = {} if session.averages is None else {AVERAGES: session.averages.state_dict()}
    return {
        WEIGHTS: session.model.state_dict(),
        OPTIMIZER: encode_optimizer(
            session.optimizer, [name for name, _ in session.model.named_parameters()]
        )[1],
        RANDOM: {"torch": torch.get_rng_state()},
        **averages,
        **row_indices_state(session.embeddings),
        **_windows_state(session),
    }


def _windows_state(session: Trained) -> DenseState:
    state = {} if session.windows is None else session.windows.state()
    return {WINDOWS: state} if state else {}


def load_windows(read: ReadTensors, files: Collection[str], session: Trained) -> None:
    """Load the windows of event time that were open, where a checkpoint has some.

    Raises:
        CheckpointError: when they are of another shape.
    """
    if session.windows is not None and WINDOWS in files:
        session.windows.load_state(read(WINDOWS))


def _own(read: ReadTensors, file: str, session: Trained) -> dict[str, Tensor]:
    before = _AVERAGED if file == AVERAGES else ""
    return without(read(file), [before + part for part in parts_elsewhere(session.model)])


def parts_elsewhere(model: nn.Module) -> Collection[str]:
    """Parts of a model that belong to groups of other ranks."""
    return all_parts(model).keys() - own_parts(model).keys()


def without(named: Mapping[str, T], parts: Collection[str]) -> dict[str, T]:
    """What does not belong to some parts of a model."""
    return {name: value for name, value in named.items() if not is_within(name, parts)}


def send_to_first(channel: Channel, state: DenseState) -> list[DenseState]:
    """Every rank's, on rank 0; nothing on the others.

    One message from each, which is there twice meanwhile.
    """
    size = channel.ranks.world_size
    is_first = channel.ranks.rank == 0
    tensors = {
        f"{file}:{name}": each.cpu().clone()
        for file, named in state.items()
        for name, each in named.items()
    }
    blob = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    lengths = channel.gather(len(blob))
    received = channel.all_to_all(
        blob, [len(blob)] + [0] * (size - 1), lengths if is_first else [0] * size
    )
    states: list[DenseState] = []
    for part in received.split(lengths) if is_first else []:
        states.append({})
        for key, tensor in sorted(load(part.numpy().tobytes()).items()):  # which come in any order
            file, _, name = key.partition(":")
            states[-1].setdefault(file, {})[name] = tensor
    return states


def _stream(tensor: Tensor) -> Stream:
    """A dense tensor as it is written; types that NumPy does not have go as their bytes."""
    here = tensor.detach().cpu()
    if here.dtype in _BY_BYTES:
        bits, name = _BY_BYTES[here.dtype]
        return replace(Stream.of(here.contiguous().view(bits).numpy()), type_name=name)
    return Stream.of(np.asarray(here.resolve_conj().resolve_neg().numpy()))
