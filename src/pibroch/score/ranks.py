"""Bulk scoring by many ranks that share the tables.

Each scores parts of its own and may be ahead of the others (bounded lag).

A rank holds its share of each table's rows and all dense layers. Batches are those of one process,
and a sample's rows are pooled by the rank that scores it, in the order of its ids: so are the bits,
on the same number of threads a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pibroch.collectives.agreement import agreed, on_first
from pibroch.collectives.world import World
from pibroch.data import EncodedDataset, JaggedBatch, Split
from pibroch.data.loader import batch_of
from pibroch.models.losses import logit_labels
from pibroch.process import threads_of_rank
from pibroch.score.checkpoint import must_fit
from pibroch.score.split import ScoreColumns, Scored, ScoreParts, check_out, opened_split
from pibroch.serve.bounded_lag import BoundedLagPipeline, Prediction
from pibroch.serve.from_checkpoint import load_embeddings, saved_dense
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.files import verify_file
from pibroch.state.manifest import Manifest, read_manifest

Advance = Callable[[int], None]


def score_split_by_ranks(
    checkpoint: Path,
    dataset: EncodedDataset,
    split: str,
    out: Path,
    world: World,
    bound: int | None = None,
    advance: Advance = lambda _: None,
) -> Scored:
    """As :func:`pibroch.score.split.score_split`, by all ranks; each calls this.

    Parts that one process or other ranks have left are kept, and the other way round. ``out`` lies
    where all ranks reach it.

    Args:
        checkpoint: a checkpoint, or a run directory for its best one.
        dataset: that fits the model.
        split: train, validation or test.
        out: the file; there must be none.
        world: the ranks.
        bound: batches on their way before a rank waits for others, see :class:`BoundedLagPipeline`.
        advance: called on rank 0, with how many more samples of all ranks are done; up to ``bound``
            batches a rank early.

    Raises:
        CheckpointError: when the checkpoint is missing, damaged, or of other data.
        ConfigError: for an ``out`` that cannot be, or parts of other scores beside it.
        DataError: for a split without samples, or a batch that the model cannot take.
        StorageError: when ``out`` is in a folder that ranks do not share.
        RankFailedError: when another rank failed or was lost.
    """
    control = world.control
    folder = Path(on_first(control, lambda: str(find_checkpoint(checkpoint))))
    manifest, dense = agreed(control, lambda: _opened(folder, dataset, world))
    opened = agreed(control, lambda: opened_split(dataset, split, needs_labels=False))
    parts = ScoreParts(out, len(opened), manifest.config.train.evaluate_batch_size)
    missing = on_first(control, lambda: _begin(parts, folder, dataset, split))
    kept = len(opened) - sum(len(parts.samples(number)) for number in missing)
    embeddings = load_embeddings(folder, manifest, world.ranks.open_channel())
    pipeline = BoundedLagPipeline(dense, embeddings, bound)
    of_logits = logit_labels(manifest.config, dataset.schema)
    columns = agreed(control, lambda: ScoreColumns(dataset, opened, of_logits))
    work = _Work(parts, opened, columns, missing, world)
    if world.is_first:
        advance(kept)
    try:
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=manifest.config.train.bf16, cache_enabled=False
        ):
            work.do(pipeline, advance)
        on_first(control, parts.merge)
    finally:
        pipeline.close()
    return Scored(len(opened), kept)


def _opened(folder: Path, dataset: EncodedDataset, world: World) -> tuple[Manifest, nn.Module]:
    """The manifest and the dense layers; each rank looks at its share of the files."""
    manifest = must_fit(read_manifest(folder), dataset)
    files = list(manifest.files.items())
    for name, digest in files[world.ranks.rank :: world.ranks.world_size]:
        verify_file(folder, name, digest)
    torch.set_num_threads(manifest.config.train.threads or threads_of_rank())
    return manifest, saved_dense(folder, manifest).eval().requires_grad_(False)


def _begin(parts: ScoreParts, folder: Path, dataset: EncodedDataset, split: str) -> list[int]:
    check_out(parts.out)
    parts.claim(folder, dataset, split)
    return parts.missing()


class _Work:
    """A rank's parts; missing ones go round, so that all ranks have as many batches."""

    def __init__(
        self,
        parts: ScoreParts,
        split: Split,
        columns: ScoreColumns,
        missing: Sequence[int],
        world: World,
    ) -> None:
        self._parts = parts
        self._split = split
        self._world = world
        self._columns = columns
        self._numbers = missing[world.ranks.rank :: world.ranks.world_size]
        self._by_rank = [
            [
                batch
                for number in missing[rank :: world.ranks.world_size]
                for batch in parts.batches(number)
            ]
            for rank in range(world.ranks.world_size)
        ]

    def do(self, pipeline: BoundedLagPipeline, advance: Advance) -> None:
        """Score this rank's parts, and answer others until all have theirs."""
        done = self._scored(pipeline, advance)
        for number in self._numbers:
            scores = [next(done) for _ in self._parts.batches(number)]
            first = self._parts.samples(number).start
            self._parts.publish(number, self._columns.frame(scores, first))
        assert next(done, None) is None

    def _scored(
        self, pipeline: BoundedLagPipeline, advance: Advance
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        labels: list[Tensor] = []

        def batches() -> Iterator[JaggedBatch]:
            for samples in self._by_rank[self._world.ranks.rank]:
                batch = batch_of(self._split, np.arange(samples.start, samples.stop))
                labels.append(batch.labels)
                yield batch

        for prediction in pipeline.run(batches()):
            if self._world.is_first:
                place = prediction.request_id
                advance(
                    sum(len(batches[place]) for batches in self._by_rank if place < len(batches))
                )
            yield _logits(prediction), labels.pop(0).numpy()


def _logits(prediction: Prediction) -> NDArray[np.float32]:
    if prediction.error is not None:
        raise prediction.error
    assert prediction.logits is not None
    return prediction.logits.float().numpy()
