"""The parts of a user's program as files of tensors and plain values, and back.

Parts are models, optimizers and schedulers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor, nn

from pibroch.collectives import Channel
from pibroch.collectives.ownership import Parts, all_parts
from pibroch.errors import CheckpointError, ConfigError
from pibroch.exchange.embeddings import Embeddings
from pibroch.state.dense import (
    OPTIMIZER,
    RANDOM,
    WEIGHTS,
    DenseState,
    gather_dense,
    led,
    parts_elsewhere,
    send_to_first,
    set_random_state,
    without,
)
from pibroch.state.files import CHECKPOINT
from pibroch.state.manifest import Manifest
from pibroch.state.optimizer_state import encode_optimizer, load_optimizer, names_of_parameters
from pibroch.state.tensor_file import load_tensors
from pibroch.state.trained import HasState
from pibroch.state.values import decode, encode
from pibroch.untrusted import checked

T = TypeVar("T")
Named: TypeAlias = T | Mapping[str, T] | None
"""None, one, or several by name."""

SCHEDULER = "scheduler.safetensors"
EXTRA = "extra.safetensors"
_FILES = {"model": WEIGHTS, "optimizer": OPTIMIZER, "scheduler": SCHEDULER, "extra": EXTRA}


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part: plain values, the tensors that they name, and which of these may be infinite."""

    tree: Any
    tensors: dict[str, Tensor]
    unchecked: Collection[str] = ()


class ProgramParts:
    """What of a program is saved and loaded besides rows.

    Args:
        model: dense layers.
        optimizer: torch optimizers.
        scheduler: whatever has a ``state_dict`` of plain values and tensors.
        embeddings: the tables, which may be a part of a model, and are saved otherwise.

    Raises:
        ConfigError: for something else.
    """

    def __init__(
        self,
        model: Named[nn.Module],
        optimizer: Named[torch.optim.Optimizer],
        scheduler: Named[HasState],
        embeddings: Embeddings,
    ) -> None:
        self._embeddings = embeddings
        self._models = _named("model", model, nn.Module)
        self._optimizers = _named("optimizer", optimizer, torch.optim.Optimizer)
        self._schedulers = _named("scheduler", scheduler, HasState)
        self._prefixes = {
            "" if part == "model" else f"{part.partition('@')[2]}.": m
            for part, m in self._models.items()
        }

    @property
    def names(self) -> list[str]:
        """Of the parts."""
        return [*self._models, *self._optimizers, *self._schedulers]

    def encode(self, extra: object) -> dict[str, EncodedPart]:
        """All parts, and ``extra`` as one, by name.

        Raises:
            ConfigError: for what cannot be stored.
        """
        for part, model in self._models.items():
            others = [
                each
                for each in model.modules()
                if isinstance(each, Embeddings) and each is not self._embeddings
            ]
            if others:
                raise ConfigError(
                    f"{part} with pibroch.Embeddings of tables"
                    f" {', '.join(t.name for t in others[0].tables)} in it",
                    "no tables but those that are saved",
                    "save each Embeddings on its own, in a folder of its own",
                )
        with self._embeddings.left_out():
            parts = {part: _encode_model(model) for part, model in self._models.items()}
        for part, optimizer in self._optimizers.items():
            parts[part] = EncodedPart(
                *encode_optimizer(optimizer, names_of_parameters(optimizer, self._prefixes))
            )
        for part, scheduler in self._schedulers.items():
            parts[part] = _encode_values(scheduler.state_dict(), part)
        return parts if extra is None else {**parts, "extra": _encode_values(extra, "extra")}

    def learning_rates(self) -> dict[str, float]:
        """Of each optimizer's first group, by the optimizer's name, ``dense`` for the only one."""
        rates = {part: each.param_groups[0].get("lr") for part, each in self._optimizers.items()}
        named = {
            part.partition("@")[2] or "dense": rate
            for part, rate in rates.items()
            if rate is not None
        }
        return {name: float(rate) for name, rate in named.items()}

    def gather(
        self, encoded: Mapping[str, EncodedPart], channel: Channel
    ) -> tuple[DenseState, dict[str, Any], dict[str, Collection[str]]]:
        """Tensors by file (on rank 0), plain values by part, and what of the files may be infinite.

        Every rank calls it.

        Raises:
            RankFailedError: when a rank was lost.
        """
        state = {file_of(part): each.tensors for part, each in encoded.items()}
        held = {file_of(part): self._held(part) for part in encoded}
        trees: dict[str, Any] = {part: each.tree for part, each in encoded.items()}
        if any(held.values()):
            self._add_what_groups_hold(trees, channel)
        dense = gather_dense(channel, lambda: state, held)
        dense |= _random_states(channel)
        unchecked = {file_of(part): each.unchecked for part, each in encoded.items()}
        return {file: tensors for file, tensors in dense.items() if tensors}, trees, unchecked

    def _add_what_groups_hold(self, trees: Mapping[str, Any], channel: Channel) -> None:
        """To rank 0's plain values of parts those of the groups' first ranks."""
        held = {
            part: {
                "state": led(channel, tree["state"], self._held(part)),
                "groups": [
                    [*led(channel, dict.fromkeys(g["params"]), self._held(part))]
                    for g in tree.get("groups", ())
                ],
            }
            for part, tree in trees.items()
            if tree and self._held(part)
        }
        for held_trees in channel.gather(held):
            for part, tree in held_trees.items():
                trees[part]["state"] |= tree["state"]
                for group, names in zip(
                    trees[part].get("groups", ()), tree["groups"], strict=False
                ):
                    group["params"] += [name for name in names if name not in group["params"]]

    def load(self, folder: Path, manifest: Manifest) -> None:
        """Fill all parts in place.

        Raises:
            CheckpointError: when the saved ones are not those of this program.
        """
        trees = {} if manifest.program is None else manifest.program.parts
        files = manifest.files
        for part, model in self._models.items():
            tensors = without(_read(folder, part, files), parts_elsewhere(model))
            with self._embeddings.left_out():
                _load_model(model, part, trees.get(part), tensors)
        away = {
            prefix + part
            for prefix, model in self._prefixes.items()
            for part in parts_elsewhere(model)
        }
        for part, optimizer in self._optimizers.items():
            names = names_of_parameters(optimizer, self._prefixes)
            tensors = without(_read(folder, part, files), away)
            load_optimizer(optimizer, names, tensors, trees.get(part), away)
        for part, scheduler in self._schedulers.items():
            state = decode(_state(trees, part), _read(folder, part, files))
            _load_scheduler(scheduler, part, state)

    def check(self, manifest: Manifest) -> list[str]:
        """The names of saved parts that are not loaded here.

        Raises:
            CheckpointError: for a part of this program that was not saved.
        """
        saved = ["model", "optimizer"] if manifest.program is None else [*manifest.program.parts]
        missing = [part for part in self.names if part not in saved]
        if missing:
            kind, _, name = missing[0].partition("@")
            raise CheckpointError(
                f"no {kind}{f' {name!r}' if name else ''} in a checkpoint of"
                f" {', '.join(['tables', *saved])}",
                "all parts that are to be loaded",
                f"leave {kind}= out of pibroch.load, or save it by pibroch.save(..., {kind}=...),"
                " under the same name",
            )
        return [part for part in saved if part not in [*self.names, "extra"]]

    def _held(self, part: str) -> Parts:
        """What of a part's tensors belongs to groups of ranks."""
        if part in self._models:
            return all_parts(self._models[part])
        if part not in self._optimizers:
            return {}
        return {
            prefix + name: who
            for prefix, model in self._prefixes.items()
            for name, who in all_parts(model).items()
        }


def file_of(part: str) -> str:
    """The file that has a part's tensors.

    >>> file_of("model"), file_of("optimizer@wide/deep")
    ('dense.safetensors', 'dense_optimizer@wide%2Fdeep.safetensors')
    """
    kind, _, name = part.partition("@")
    suffix = f"@{quote(name, safe=' ')}.safetensors" if name else ".safetensors"
    return _FILES[kind].removesuffix(".safetensors") + suffix


def load_extra(folder: Path, manifest: Manifest) -> object:
    """What the program kept besides; ``None`` when nothing."""
    if manifest.program is None or "extra" not in manifest.program.parts:
        return None
    return decode(_state(manifest.program.parts, "extra"), _read(folder, "extra", manifest.files))


def restore_random(folder: Path, manifest: Manifest, channel: Channel) -> bool:
    """Set torch's random state to this rank's; not where another number of ranks saved it."""
    ranks = channel.ranks
    num_saved = 1 if manifest.program is None else manifest.program.num_ranks
    if ranks.world_size != num_saved or RANDOM not in manifest.files:
        return False
    set_random_state(load_tensors(folder, RANDOM), _random_name(ranks.rank))
    return True


def _random_name(rank: int) -> str:
    return f"torch@{rank}" if rank else "torch"


def _random_states(channel: Channel) -> DenseState:
    own = {RANDOM: {_random_name(channel.ranks.rank): torch.get_rng_state()}}
    if channel.ranks.world_size == 1:
        return own
    all_states: dict[str, Tensor] = {}
    for sent in send_to_first(channel, own):
        all_states |= sent[RANDOM]
    return {RANDOM: all_states}


def _named(kind: str, given: Named[Any], wanted: type) -> dict[str, Any]:
    """By the names of parts: ``model``, or ``model@name`` of several."""
    if given is None:
        return {}
    several = isinstance(given, Mapping) and not isinstance(given, nn.Module)
    named = {f"{kind}@{name}": each for name, each in given.items()} if several else {kind: given}
    for part, each in named.items():
        if not isinstance(each, wanted) or isinstance(each, type):
            raise ConfigError(
                f"{part}, a {type(each).__name__}",
                {"model": "a torch module", "optimizer": "a torch optimizer"}.get(
                    kind, "something with state_dict()"
                ),
                "pass one, or several by name: {'wide': ..., 'deep': ...}",
            )
    return named


def _encode_model(model: nn.Module) -> EncodedPart:
    tensors: dict[str, Tensor] = {}
    state = {key: encode(value, key, tensors) for key, value in model.state_dict().items()}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unchecked = tensors.keys() - trained
    only_tensors = all(value == {"$tensor": key} for key, value in state.items())
    return EncodedPart(None if only_tensors else {"state": state}, tensors, unchecked)


def _encode_values(value: object, part: str) -> EncodedPart:
    tensors: dict[str, Tensor] = {}
    return EncodedPart({"state": encode(value, part, tensors)}, tensors, tensors.keys())


def _load_model(model: nn.Module, part: str, tree: Any, tensors: Mapping[str, Tensor]) -> None:
    named = tensors
    if tree is not None:
        named = decode(without(_state({part: tree}, part), parts_elsewhere(model)), tensors)
    try:
        model.load_state_dict(dict(named))
    except (RuntimeError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{part} in the checkpoint that does not fit: {str(error).splitlines()[-1].strip()}",
            "the same layers of the same shapes",
            "make the model as it was when the checkpoint was saved",
        ) from error


def _load_scheduler(scheduler: HasState, part: str, state: dict[str, Any]) -> None:
    """Fill a scheduler.

    Torch's schedulers take any name as an attribute; none may hide a method.
    """
    do = "make it as it was when the checkpoint was saved"
    hidden = [name for name in state if callable(getattr(type(scheduler), str(name), None))]
    if hidden:
        raise CheckpointError(f"{hidden[0]!r} in {part}, a method", "its state alone", do)
    try:
        scheduler.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        got = (
            f"{part} in the checkpoint that {type(scheduler).__name__} does not take:"
            f" {error!r:.200}"
        )
        raise CheckpointError(got, "its own state", do) from error


def _state(trees: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The state of a part, still encoded."""
    where = f"part {part!r} of the checkpoint"
    tree = checked(dict[str, Any], trees.get(part), where, CHECKPOINT)
    state: dict[str, Any] = tree.get("state")
    return state if part == "extra" else checked(dict[str, Any], state, where, CHECKPOINT)


def _read(folder: Path, part: str, files: Collection[str]) -> dict[str, Tensor]:
    file = file_of(part)
    return load_tensors(folder, file) if file in files else {}
