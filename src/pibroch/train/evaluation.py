"""Evaluate a model on a split, batch by batch, on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.config import RunConfig
from pibroch.data import EncodedDataset, JaggedBatch, Loader
from pibroch.data.dataset import SplitName
from pibroch.data.health import click_rates
from pibroch.errors import ConfigError, DataError, NonFiniteLossError
from pibroch.kernels.arrays import Array
from pibroch.observability.records import UNWEIGHTED
from pibroch.train.all_items import figures_over_all_items
from pibroch.train.metrics import Curves, Evaluation, Metrics, Predictions
from pibroch.train.monitored import check_monitor, is_over_all_items, monitored
from pibroch.train.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AccessSkew:
    """How few rows take most accesses.

    Attributes:
        row_share: fractions of the rows that are accessed at all, most accessed first, rising to 1.
        access_share: fraction of all accesses that these rows take.
    """

    row_share: list[float]
    access_share: list[float]


_CONSEQUENCES = {
    "train": "there is nothing to tell apart, check the schema's label",
    "validation": (
        "AUC is not defined, so nothing chooses a best model, lowers rates or stops the run early, "
        "and the last model is kept; --set train.monitor=logloss goes by log loss"
    ),
    "test": "AUC is not defined, so the run ends without",
}
"""Of labels that are all alike."""


def check_splits(config: RunConfig, dataset: EncodedDataset) -> None:
    """Whether a run can do with the samples of its splits; logs what it will leave out.

    Reads all labels, those of the test split unless it is left out.

    Raises:
        DataError: without training samples.
        ConfigError: for a setting that needs validation samples where there are none.
    """
    empty = [split for split, count in dataset.samples.items() if count == 0]
    has_stream = config.data.stream is not None
    if "train" in empty and not has_stream:
        raise DataError(
            f"no training samples in {dataset.path}", "samples to train on", "prepare more data"
        )
    schema = dataset.schema
    check_monitor(config, schema)
    label, figure = monitored(config.train.monitor, schema)
    read = ["train", "validation"]
    read += ["test"] if config.train.evaluate_test else []
    alike = {
        (of_label, split): rate
        for of_label, rates in click_rates(dataset, read).items()
        for split, rate in rates.items()
        if rate in (0.0, 1.0)
    }
    if figure.removesuffix(UNWEIGHTED) != "auc":
        alike.pop((label, "validation"), None)
    needing = {
        "train.early_stop_patience": (config.train.early_stop_patience, None),
        "schedule.plateau_factor": (config.schedule.plateau_factor, 1.0),
    }
    for key, (value, off) in needing.items():
        if "validation" in empty and value != off:
            raise ConfigError(
                f"`{key} = {value}` with no validation samples in {dataset.path}",
                "a validation split, by which it goes",
                f"pass --set {key}={'none' if off is None else off}, or prepare the data with"
                " --split time:0.8/0.1/0.1",
            )
    for (of_label, split), rate in alike.items():
        which = f" ({of_label})" if len(schema.label_columns) > 1 else ""
        logger.warning(
            "all %s labels%s are %.0f in %s: %s",
            split,
            which,
            rate,
            dataset.path,
            _CONSEQUENCES[split],
        )
    if has_stream:
        return
    if "validation" in empty:
        logger.warning(
            "no validation samples in %s: nothing chooses a best model, so the last one is kept",
            dataset.path,
        )
    if "test" in empty and config.train.evaluate_test:
        logger.warning("no test samples in %s: the run ends without an evaluation", dataset.path)


def evaluate(session: Session, split: SplitName) -> Evaluation:
    """Figures over a whole split, the same on all ranks.

    Weights, optimizer state and random numbers stay untouched.

    Each rank of the session's world predicts its part of each batch and calls this at the same time
    as the others.

    Raises:
        NonFiniteLossError: (on all ranks) for a model whose predictions are no numbers.
    """
    ranks = session.world.ranks
    loader = Loader(
        session.dataset.split(split),
        session.config.train.evaluate_batch_size,
        part=(ranks.rank, ranks.world_size),
    )
    batches: Iterable[JaggedBatch] | None = None
    if session.processors is not None:
        batches = session.processors.batches(session.dataset, loader, len(loader))
    config = session.config
    dataset = session.dataset
    over_all_items = {}
    with session.predicting() as predicting:
        predictions = predict(loader, predicting, _empty(config, dataset), batches)
        if is_over_all_items(config, dataset.schema):
            over_all_items = figures_over_all_items(
                predicting.model,
                predicting.looked_up,
                dataset,
                dataset.split(split),
                config.train,
                session.world.control,
            )
    evaluation = _result_of_all(predictions, _empty(config, dataset), session.world.control)
    evaluation.tasks[dataset.schema.label_columns[0]].update(over_all_items)
    check_finite(evaluation, split)
    return evaluation


def _empty(config: RunConfig, dataset: EncodedDataset) -> Predictions:
    return Predictions(dataset.schema.targets, config.train.top_k)


def check_finite(evaluation: Evaluation, split: str) -> None:
    """Raise NonFiniteLossError for figures of predictions that are no numbers."""
    if not evaluation.metrics.num_samples:
        return
    for label, figures in evaluation.tasks.items():
        name = "logloss" if "logloss" in figures else "rmse"
        figure = figures.get(f"{name}{UNWEIGHTED}", figures[name])  # of every sample
        if math.isfinite(figure):
            continue
        of_label = f" of {label}" if len(evaluation.tasks) > 1 else ""
        raise NonFiniteLossError(
            f"{'log loss' if name == 'logloss' else name} {figure}{of_label} over the"
            f" {split} split",
            "predictions that are numbers",
            "lower the learning rates or set train.clip_norm, and go on from an earlier checkpoint",
        )


def predict(
    loader: Loader,
    logits: Callable[[JaggedBatch], Tensor],
    predictions: Predictions | None = None,
    batches: Iterable[JaggedBatch] | None = None,
) -> Predictions:
    """Predictions for an epoch of samples in their order, by a function that gives logits.

    Args:
        loader: of all batches.
        logits: of a batch.
        predictions: to which these are added; new ones when absent.
        batches: the same as the loader's, where others make them.
    """
    predictions = Predictions() if predictions is None else predictions
    batches = loader if batches is None else batches
    # weights first: they are of the batches before which the loader stands
    for weights, batch in zip(loader.weights_in_data(), batches, strict=True):
        groups = None if batch.groups is None else batch.groups.numpy()
        predictions.add(logits(batch).numpy(), batch.labels.numpy(), groups, weights)
    return predictions


def _result_of_all(predictions: Predictions, whole: Predictions, channel: Channel) -> Evaluation:
    """Bring all ranks' predictions to rank 0, which computes for all.

    Args:
        predictions: of this rank.
        whole: to which rank 0 adds all.
        channel: to the others.
    """
    if channel.ranks.world_size == 1:
        return predictions.result()
    logits, labels = predictions.arrays()
    is_bits = labels.dtype == np.bool_
    everyone = [
        _to_first(channel, torch.from_numpy(logits)),
        _to_first(channel, torch.from_numpy(labels.view(np.uint8) if is_bits else labels)),
    ]
    optional: dict[str, tuple[Array | None, type[np.generic]]] = {
        "groups": (predictions.groups(), np.int64),
        "weights": (predictions.weights(), np.float32),
    }
    of_everyone = {}
    for name, (of_rank, dtype) in optional.items():
        if any(channel.gather(of_rank is not None)):
            column = np.empty(0, dtype) if of_rank is None else of_rank
            of_everyone[name] = _to_first(channel, torch.from_numpy(column)).numpy()
    result = None
    if channel.ranks.rank == 0:
        everything = [each.numpy() for each in everyone]
        whole.add(everything[0], everything[1].astype(np.float32), **of_everyone)
        result = asdict(whole.result())
    plain = channel.gather(result)[0]
    return Evaluation(Metrics(**plain["metrics"]), Curves(**plain["curves"]), plain["tasks"])


def _to_first(channel: Channel, tensor: Tensor) -> Tensor:
    """What all ranks hold, ``[N, ...]``, in rank order on rank 0; empty elsewhere."""
    elsewhere = [0] * (channel.ranks.world_size - 1)
    counts = channel.gather(len(tensor))
    is_first = channel.ranks.rank == 0
    return channel.all_to_all(
        tensor, [len(tensor), *elsewhere], counts if is_first else [0, *elsewhere]
    )


def access_skew(dataset: EncodedDataset, num_points: int = 60) -> AccessSkew:
    """Skew of the training split over the rows of all tables; raw ids are left out.

    Costs one sort of the rows that are accessed.
    """
    tables = dataset.known_num_rows if dataset.samples["train"] else {}
    accessed = (dataset.accesses(table).counts.astype(np.uint32) for table in tables)
    counts = np.concatenate([np.empty(0, np.uint32), *accessed])
    if not len(counts):
        return AccessSkew([], [])
    counts.sort()
    points = np.unique(np.geomspace(1, len(counts), num_points).astype(np.int64))
    shares = np.cumsum(counts[::-1], dtype=np.int64)[points - 1] / counts.sum(dtype=np.int64)
    return AccessSkew((points / len(counts)).tolist(), shares.tolist())
