"""What may change between the processes of one run.

Settings that may not are refused, what changes its numbers is said.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pibroch.config import RunConfig
from pibroch.config.differences import differences, spelled
from pibroch.errors import CheckpointError
from pibroch.state.manifest import Manifest

logger = logging.getLogger(__name__)

_FOR_GOOD = ("model", "optimizer.name", "embedding.optimizer.name", "train.average")
"""Without these, by the beginnings of keys, saved weights and state mean something else."""
_ONCE_BEGUN = ("seed", "train.batch_size", "train.accumulate", "train.monitor")
"""Settings by which the position in the data, the steps left and the best value are counted."""
_WITHOUT_EFFECT = (
    "data",
    "embedding.init",
    "embedding.exchange",
    "train.epochs",
    "train.steps",
    "train.evaluate_every",
    "train.early_stop_patience",
    "train.evaluate_batch_size",
    "train.checkpoint_every",
    "train.full_checkpoint_every",
    "train.checkpoint_every_seconds",
    "train.cut_every_seconds",
    "train.keep",
    "train.publish_to",
    "train.publish_every_seconds",
    "train.publish_dtype",
    "train.publish_compact_every",
    "train.publish_keep_seconds",
    "train.log_every",
    "train.log_lost_ids",
    "train.threads",
    "train.windows",
)
"""These change no step, or are looked at elsewhere.

The data by their digest, threads among the surroundings.
"""
_WIRE = "embedding.exchange.wire"
_WITH_EFFECT = ("model.dropout", "model.embedding_dropout", _WIRE)
"""Exceptions of the above. What is named nowhere has an effect, too, such as learning rates."""
_LENGTH = ("train.epochs", "train.steps")
_DECIDES_NUMBERS = (
    "pibroch",
    "python",
    "torch",
    "numba",
    "numpy",
    "processor",
    "threads",
    "ranks",
)


def check_settings(manifest: Manifest, config: RunConfig) -> None:
    """Compare a run's settings with those that its checkpoint was saved with.

    Raises:
        CheckpointError: names the settings that a run keeps to its end, with both values.
    """
    changed = differences(manifest.config, config)
    kept = _FOR_GOOD if manifest.progress.loader is None else _FOR_GOOD + _ONCE_BEGUN
    refused = [key for key in changed if _is_in(key, kept) and not _is_in(key, _WITH_EFFECT)]
    if refused:
        raise CheckpointError(
            f"{spelled({key: changed[key][1] for key in refused})} for a run that goes on from step"
            f" {manifest.progress.step}",
            f"{spelled({key: changed[key][0] for key in refused})}, with which it began",
            "leave what it began with, or start anew in another --run-dir",
        )


def warn_of_settings(manifest: Manifest, config: RunConfig) -> None:
    """Log settings that change a run's numbers and differ from its checkpoint's."""
    changed = differences(manifest.config, config)
    if set(changed.get(_WIRE, ())) == {None, "float32"}:  # exchanges without a wire are exact
        del changed[_WIRE]
    spans_run = config.schedule.name in ("cosine", "linear") and config.schedule.decay_steps is None
    effective = _WITH_EFFECT + _LENGTH if spans_run else _WITH_EFFECT
    logged = [key for key in changed if _is_in(key, effective) or not _is_in(key, _WITHOUT_EFFECT)]
    if logged and manifest.progress.loader is not None:
        logger.warning(
            "from step %d on: %s in place of %s; the run then ends with the numbers of neither",
            manifest.progress.step + 1,
            *(spelled({key: changed[key][i] for key in logged}) for i in (1, 0)),
        )


def warn_of_surroundings(before: Mapping[str, object], here: Mapping[str, object]) -> None:
    """Log which versions, processor, threads or ranks are not those that a run began with.

    Its numbers are then rounded otherwise.

    Args:
        before: from ``versions.json``; what it does not say is not compared.
        here: of this process.
    """
    changed = [key for key in _DECIDES_NUMBERS if key in before and before[key] != here[key]]
    if changed:
        logger.warning(
            "this run began with %s and goes on with %s: its numbers may differ from those of a"
            " run that never stopped",
            _listed(before, changed),
            _listed(here, changed),
        )


def _listed(values: Mapping[str, object], keys: Sequence[str]) -> str:
    counts = {
        key: f"{values[key]} {key if values[key] != 1 else key[:-1]}"
        for key in keys
        if key in ("threads", "ranks")
    }
    return ", ".join(counts.get(key, f"{key} {values[key]}") for key in keys)


def _is_in(key: str, beginnings: Sequence[str]) -> bool:
    return any(key == beginning or key.startswith(f"{beginning}.") for beginning in beginnings)
