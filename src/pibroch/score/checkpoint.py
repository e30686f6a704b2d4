"""A checkpoint over a split: its predictor, and its metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from pibroch.data import EncodedDataset, Loader
from pibroch.data.health import click_rates
from pibroch.data.schema import Target
from pibroch.embedding import SGD
from pibroch.errors import CheckpointError
from pibroch.score.split import ScoreColumns, check_out, opened_split, write_predictions
from pibroch.serve.predictor import Predictor
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.manifest import Manifest, read_manifest, schema_of
from pibroch.state.tables import check_tables_match, saved_tables
from pibroch.train.all_items import figures_over_all_items
from pibroch.train.evaluation import check_finite, predict
from pibroch.train.metrics import Evaluation, Predictions
from pibroch.train.session import build_tables

logger = logging.getLogger(__name__)


def evaluate_checkpoint(
    path: Path,
    dataset: EncodedDataset,
    split: str,
    out: Path | None = None,
    items: Path | None = None,
) -> Evaluation:
    """Figures of a checkpoint, or of a run directory's best one, over a split.

    On the threads that the recipe asks for.

    Args:
        path: the checkpoint.
        dataset: encoded as the one that it was trained on.
        split: train, validation or test.
        out: a file for the scores, see :func:`pibroch.score.split.score_split`.
        items: a file in place of the recipe's ``train.items``.

    Raises:
        CheckpointError: when it is missing, damaged, or of other labels, tables or dense features.
        ConfigError: when there is no such split, or ``out`` cannot be written.
        DataError: when it has no samples, or for a file of items that cannot be read.
        NonFiniteLossError: when predictions are no numbers.
    """
    if out is not None:
        check_out(out)
    opened = opened_split(dataset, split)
    predictor, _ = open_for(path, dataset)
    loader = Loader(opened, predictor.config.train.evaluate_batch_size)
    schema = dataset.schema
    empty = Predictions(schema.targets, predictor.config.train.top_k)
    predictions = predict(loader, predictor.logits, empty)
    if out is not None:
        columns = ScoreColumns(dataset, opened, predictor.logit_labels)
        write_predictions(predictions, columns, out)
    evaluation = predictions.result()
    settings = predictor.config.train
    if items is not None:
        settings = settings.model_copy(update={"items": str(items)})
    (label, *_) = evaluation.tasks
    evaluation.tasks[label].update(
        figures_over_all_items(
            predictor.dense,
            predictor.looked_up,
            dataset,
            opened,
            settings,
        )
    )
    check_finite(evaluation, split)
    undefined = [name for name, each in evaluation.tasks.items() if math.isnan(each.get("auc", 0))]
    rates = click_rates(dataset, [split]) if undefined else {}
    for label in undefined:
        if rates[label][split] not in (0.0, 1.0):
            logger.warning(
                "samples of one label%s of the %s split all weigh 0: AUC is defined without weights"
                " only",
                f" ({label})" if len(evaluation.tasks) > 1 else "",
                split,
            )
            continue
        which = f" ({label})" if len(evaluation.tasks) > 1 else ""
        logger.warning(
            "all labels%s of the %s split are %.0f: AUC is not defined, as it compares samples of"
            " label 1 with those of label 0",
            which,
            split,
            rates[label][split],
        )
    return evaluation


def open_for(path: Path, dataset: EncodedDataset) -> tuple[Predictor, Path]:
    """The predictor of a checkpoint, and the checkpoint's folder.

    Of a run directory, its best checkpoint's.

    Torch computes on the threads that the recipe asks for from then on.

    Raises:
        CheckpointError: when it is missing, damaged, or of other tables, dense features or
            vocabularies.
    """
    folder = find_checkpoint(path)
    config = must_fit(read_manifest(folder), dataset).config
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    return Predictor.open(folder), folder


def must_fit(manifest: Manifest, dataset: EncodedDataset) -> Manifest:
    """The manifest, when its tables, dense features and vocabularies are those of the data."""
    tables = build_tables(manifest.config, dataset.num_rows)
    check_tables_match(manifest.tables, saved_tables(tables, SGD(lr=1.0)), same_state=False)
    labels = schema_of(manifest).targets
    if _kinds(labels) != _kinds(dataset.schema.targets):
        raise CheckpointError(
            f"labels {_listed(dataset.schema.targets)} in the data",
            f"{_listed(labels)}, as the checkpoint was trained on",
            "prepare the data with the schema that it was trained on",
        )
    names = schema_of(manifest).dense_names
    if names != dataset.schema.dense_names:
        raise CheckpointError(
            f"dense features {', '.join(dataset.schema.dense_names) or 'none'} in the data",
            f"{', '.join(names) or 'none'}, as the checkpoint was trained on",
            "prepare the data with the schema that it was trained on",
        )
    # equal sizes, other vocabularies: ids would mean other rows
    if manifest.dataset_fingerprint != dataset.fingerprint:
        raise CheckpointError(
            f"data {dataset.fingerprint[:12]}, whose vocabularies or encodings are not the"
            " checkpoint's",
            f"data {manifest.dataset_fingerprint[:12]}, on which it was trained",
            "evaluate on that data, or on such as was encoded with the same vocabularies",
        )
    return manifest


def _kinds(targets: Mapping[str, Target]) -> list[str]:
    return [target.kind for target in targets.values()]


def _listed(targets: Mapping[str, Target]) -> str:
    return ", ".join(f"{label} ({target.kind})" for label, target in targets.items())
