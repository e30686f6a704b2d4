"""``pibroch.save`` and ``pibroch.load``.

A program of one's own in the checkpoints that ``pibroch train`` writes.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pibroch.collectives import Channel
from pibroch.collectives.agreement import agreed, on_first, together
from pibroch.data.batch import LoaderPosition
from pibroch.errors import CheckpointError, ConfigError
from pibroch.exchange import Embeddings
from pibroch.integers import whole_number
from pibroch.state.checkpoint import Content, check_tables, save_checkpoint, verify_files
from pibroch.state.checkpoint_folder import (
    CheckpointFolder,
    must_have_none,
    newest_whole,
    set_aside,
    step_of,
)
from pibroch.state.dense import load_row_indices, row_indices_state, tensors_in
from pibroch.state.files import CHECKPOINT, explained_refusal
from pibroch.state.manifest import MANIFEST, Manifest, ProgramState, Progress, read_manifest
from pibroch.state.optimizer_state import is_alike
from pibroch.state.tables import load_tables
from pibroch.state.trained import HasState
from pibroch.state.values import decode, encode
from pibroch.storage import remove_leftovers
from pibroch.train.program_state import (
    EncodedPart,
    Named,
    ProgramParts,
    load_extra,
    restore_random,
)
from pibroch.untrusted import checked

logger = logging.getLogger(__name__)
Position = LoaderPosition | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint held besides what was filled in place.

    Attributes:
        path: of the checkpoint; ``None`` where there was none.
        step: of the checkpoint, 0 where there was none.
        position: in the data, as it was given to :func:`save`.
        extra: as it was given to :func:`save`.
    """

    path: Path | None = None
    step: int = 0
    position: LoaderPosition | dict[str, Any] | None = None
    extra: Any = None


def save(
    folder: str | Path,
    embeddings: Embeddings,
    *,
    model: Named[nn.Module] = None,
    optimizer: Named[torch.optim.Optimizer] = None,
    scheduler: Named[HasState] = None,
    position: Position | None = None,
    extra: object = None,
    step: int | None = None,
    keep: int | None = 2,
) -> Path:
    """Save a program into ``folder/step-N``, the path that is returned.

    Every rank that has tables calls it, between two steps.

    Rows with the state of each table's optimizer, their learning rates and step, dense layers,
    torch's optimizers and random state (of each rank): with all of it a program goes on to the same
    bits. The checkpoint is there whole or not at all, and is on the disk when this returns. Any
    number of ranks under any exchange loads it by :func:`load`.

    Dense layers are saved by rank 0, with what groups of ranks hold of them; so is ``extra``.
    Nothing is pickled: states hold numbers, texts, dense tensors, and dicts, lists, tuples and
    Counters of these. Anything else is an error that names it. Functions that torch's ``LambdaLR``
    and its like leave out of their states are not saved: make them anew.

    Args:
        folder: for this program alone; on a disk that all ranks see.
        embeddings: the tables.
        model: dense layers; one, or several by name.
        optimizer: torch's, of dense layers; one, or several by name.
        scheduler: whatever has ``state_dict()`` and ``load_state_dict()``; one, or several by name.
        position: in the data: ``batch.position``, or ``loader.state_at(batch.position)``, which
            also knows the shuffling.
        extra: small plain values, or tensors.
        step: names the checkpoint; ``embeddings.step`` when absent. One of the same step is
            replaced; later ones, which belong to another history, are set aside as
            ``step-N.aside``.
        keep: how many of the newest to keep; ``None`` for all.

    Raises:
        ConfigError: (on all ranks) for what cannot be stored, or ranks at different steps.
        StorageError: (on all ranks) when the disk refuses; what was saved before stays.
        TrainingError: (on all ranks) when a parameter is NaN or infinite.
        RankFailedError: when a rank was lost.
    """
    channel = embeddings.control

    def encode_all() -> tuple[ProgramParts, dict[str, EncodedPart], Progress, int | None]:
        most = None if keep is None else whole_number(keep, "keep", 1, "None keeps all")
        parts = ProgramParts(model, optimizer, scheduler, embeddings)
        number = embeddings.step if step is None else whole_number(step, "step")
        progress = Progress(step=number, loader=_plain(position))
        return parts, parts.encode(extra), progress, most

    parts, encoded, progress, most = agreed(channel, encode_all)
    _check_same_step(channel, progress.step, embeddings.step)
    checkpoints = CheckpointFolder(Path(folder), most or 1, channel=channel)
    on_first(channel, lambda: _prepare(checkpoints, progress.step))
    dense, trees, unchecked = parts.gather(encoded, channel)
    if channel.ranks.rank == 0:
        dense |= row_indices_state(embeddings)
    path = checkpoints.path(progress.step)
    save_checkpoint(
        path,
        embeddings,
        Content(dense, _about(embeddings, parts, trees, progress), unchecked),
        channel,
    )
    if most is not None:
        on_first(channel, checkpoints.remove_old)
    return path


def _about(
    embeddings: Embeddings, parts: ProgramParts, trees: dict[str, Any], progress: Progress
) -> dict[str, object]:
    """What a manifest says of a program beside its files."""
    num_ranks = embeddings.control.ranks.world_size
    state = ProgramState(
        embedding_step=embeddings.step, num_ranks=num_ranks, rates=_rates(embeddings), parts=trees
    )
    rates = {"embedding": embeddings.learning_rate} | parts.learning_rates()
    return {"program": state, "progress": progress, "learning_rates": rates}


def load(
    path: str | Path,
    embeddings: Embeddings,
    *,
    model: Named[nn.Module] = None,
    optimizer: Named[torch.optim.Optimizer] = None,
    scheduler: Named[HasState] = None,
    row_state: bool = True,
    missing_ok: bool = False,
) -> Saved:
    """Fill a program, in place, from what :func:`save` or ``pibroch train`` wrote.

    Every rank calls it, between two steps.

    Every byte is verified first. Of a folder the newest checkpoint is taken; where it is damaged,
    with a warning, the one before. Parts are named as they were in :func:`save`; what was saved and
    is not asked for stays behind, with a warning. Torch's random state is set where as many ranks
    load as saved. On as many ranks the program goes on to the same bits.

    Args:
        path: the folder given to :func:`save`, a run directory, or one checkpoint.
        embeddings: with the same tables.
        model: dense layers; one, or several by name.
        optimizer: over the same parameters.
        scheduler: of the same kinds.
        row_state: whether rows' optimizer state, learning rates and step are loaded; without it
            tables of any sparse optimizer take the weights.
        missing_ok: begin anew where there is no checkpoint; else that is an error.

    Raises:
        CheckpointError: (on all ranks) when there is none, all are damaged, or it is of other
            tables, layers or optimizers.
        RankFailedError: when a rank was lost.
    """
    channel = embeddings.control
    where = Path(path)
    parts = agreed(channel, lambda: ProgramParts(model, optimizer, scheduler, embeddings))
    names: list[str] | None = on_first(channel, lambda: _candidates(where))
    if names is None:
        manifest = agreed(channel, lambda: read_manifest(where))
        return _restore(where, manifest, embeddings, parts, row_state)
    loaded: list[Saved] = []

    def restore(folder: Path, manifest: Manifest) -> None:
        loaded.append(_restore(folder, manifest, embeddings, parts, row_state))

    base, damaged = newest_whole(channel, [where / name for name in names], restore)
    if base is None:
        must_have_none(damaged, "put back a copy of one, or begin anew in another folder")
        if not missing_ok:
            raise CheckpointError(
                f"no checkpoint in {where}",
                "a folder that pibroch.save wrote to, or one checkpoint",
                "check the path, or pass missing_ok=True to begin anew",
            )
        return Saved()
    for other, problem in damaged.items():
        logger.warning(
            "the checkpoint of step %d is damaged (%s): loaded that of step %d",
            step_of(other),
            problem.got,
            step_of(base.folder),
        )
    logger.info("loaded %s", base.folder)
    return loaded[-1]


def _restore(
    folder: Path, manifest: Manifest, embeddings: Embeddings, parts: ProgramParts, row_state: bool
) -> Saved:
    """Everything from one checkpoint; nothing is changed when a file is damaged."""
    channel = embeddings.control
    program = manifest.program

    def check() -> list[str]:
        check_tables(manifest, embeddings, same_state=row_state, weights_alone=not row_state)
        if row_state and program is not None:
            _settings_of_groups(program, embeddings)
        return parts.check(manifest)

    left = agreed(channel, check)
    verify_files(folder, manifest, channel)
    if left:
        logger.warning("saved in %s and not loaded: %s", folder, ", ".join(left))
    together(channel, lambda: parts.load(folder, manifest))
    together(channel, lambda: _fill_rows(folder, manifest, embeddings, row_state))
    if not restore_random(folder, manifest, channel):
        logger.info(
            "torch's random state stays as it is: %s was saved by another number of ranks", folder
        )
    position = decode(manifest.progress.loader, {})
    if isinstance(position, dict) and position.keys() == {"epoch", "sample"}:
        position = checked(LoaderPosition, position, f"the position in {folder}", CHECKPOINT)
    return Saved(folder, manifest.progress.step, position, load_extra(folder, manifest))


def _fill_rows(folder: Path, manifest: Manifest, embeddings: Embeddings, row_state: bool) -> None:
    with embeddings.rewriting() as views:
        load_row_indices(tensors_in(folder), embeddings)
        if row_state:
            load_tables(folder, manifest.tables, views)
        else:
            load_tables(folder, manifest.tables, [replace(view, state={}) for view in views])
            for view in views:
                if "average" in view.state:
                    view.state["average"][:] = view.weights
                    view.state["averaged_at"][:] = embeddings.step
    if row_state and manifest.program is None:
        embeddings.step = manifest.progress.step
        embeddings.learning_rate = manifest.learning_rates["embedding"]
    elif row_state and manifest.program is not None:
        embeddings.step = manifest.program.embedding_step
        settings = _settings_of_groups(manifest.program, embeddings)
        for group, kept in zip(embeddings.fused_optimizer.param_groups, settings, strict=True):
            for key, value in kept.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value


def _rates(embeddings: Embeddings) -> dict[str, dict[str, Any]]:
    """Of each table, what torch's schedulers know of its group."""
    rates: dict[str, dict[str, Any]] = {}
    for group in embeddings.fused_optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "tables")}
        plain = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in settings.items()
        }
        rates |= {table: encode(plain, "fused_optimizer", {}) for table in group["tables"]}
    return rates


def _settings_of_groups(program: ProgramState, embeddings: Embeddings) -> list[dict[str, object]]:
    """The reverse of :func:`_rates`, for the groups of these tables."""
    settings = []
    for group in embeddings.fused_optimizer.param_groups:
        tables = group["tables"]
        odd = next(
            (table for table in tables if program.rates[table] != program.rates[tables[0]]), None
        )
        if odd is not None:
            raise CheckpointError(
                f"tables {tables[0]!r} and {odd!r} with one optimizer, whose rows were saved with"
                " different rates",
                "optimizers as they were when the checkpoint was saved",
                "give each table its own again",
            )
        kept = decode(program.rates[tables[0]], {})
        odd_key = next((key for key in kept if not is_alike(kept[key], group.get(key))), None)
        if odd_key is not None:
            got = f"{odd_key} = {kept[odd_key]!r:.60} of table {tables[0]!r} in the checkpoint"
            raise CHECKPOINT(got, f"what is like {group[odd_key]!r}")
        settings.append(kept)
    return settings


def _plain(position: Position | None) -> dict[str, object] | None:
    if position is None:
        return None
    tensors: dict[str, Tensor] = {}
    values = asdict(position) if isinstance(position, LoaderPosition) else position
    plain = encode(values, "position", tensors) if isinstance(values, Mapping) else None
    if not isinstance(plain, dict) or tensors:
        raise ConfigError(
            f"position={position!r}",
            "batch.position, loader.state_at(...), or plain values by name",
            "keep anything else in extra=",
        )
    return plain


def _check_same_step(channel: Channel, number: int, step: int) -> None:
    steps = channel.gather([number, step])
    odd = next((rank for rank, counters in enumerate(steps) if counters != steps[0]), None)
    if odd is not None:
        raise ConfigError(
            f"step {steps[0][0]} after {steps[0][1]} updates on rank 0, step {steps[odd][0]} after"
            f" {steps[odd][1]} updates on rank {odd}",
            "all ranks at the same step",
            "call pibroch.save at the same place on every rank",
        )


def _prepare(checkpoints: CheckpointFolder, step: int) -> None:
    """What earlier programs left; on rank 0."""
    folder = checkpoints.folder
    with explained_refusal(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        for replaced in folder.glob("step-*.replaced"):  # killed while one took the other's name
            whole = replaced.with_suffix("")
            if whole.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(whole)
    later = [checkpoints.path(other) for other in checkpoints.steps() if other > step]
    if later:
        logger.warning(
            "saving step %d in a folder with later ones: %s, of another history, are set aside"
            " as *.aside",
            step,
            ", ".join(path.name for path in later),
        )
        set_aside(later, lambda path: path.with_name(f"{path.name}.aside"))


def _candidates(path: Path) -> list[str] | None:
    """The checkpoints that a path may mean, newest first; ``None`` for the path itself."""
    if (path / MANIFEST).is_file():
        return None
    inner = "checkpoints" if (path / "checkpoints").is_dir() else ""
    checkpoints = CheckpointFolder(path / inner, keep=1)
    names = {step: checkpoints.path(step).name for step in checkpoints.steps()}
    for replaced in checkpoints.folder.glob("step-*.replaced"):
        names.setdefault(step_of(replaced), replaced.name)
    return [f"{inner}/{names[step]}".removeprefix("/") for step in sorted(names, reverse=True)]
