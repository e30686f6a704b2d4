"""What a bounded number of rows costs in AUC where hot ids go out of use and new ones come.

Samples are trained on in the order of time, once; those after them are the test. Ids are raw.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

import pibroch as pb
from benchmarks.comparison import noise_note
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options
from benchmarks.results import Report, Row
from pibroch.data.planted import TruthMeter
from pibroch.data.synthetic import Generator, SyntheticOptions
from pibroch.embedding import HashedIndex, Identity
from pibroch.embedding.initializers import Uniform
from pibroch.kernels.arrays import Ints

BATCH = 256
STEPS = 10_000
QUICK_STEPS = 300
TEST_SAMPLES = 262_144
TABLE_ROWS = 100_000  # ids of the largest tables at a time
SHARE = 0.01  # of the hot ids
EVERY = 1_000  # steps
ROWS_SHARE = 0.2  # of all ids ever seen
WHOLE = 2_000  # tables of so few ids have a row for each
DIM = 5  # one for the linear part
INITIAL = Uniform(0.01)  # whatever the number of rows
COLUMNS = ["contender", "steps", "rows", "rows_share", "auc", "auc_lost_e3", "hit_rate",
           "evictions", "samples_per_s"]  # fmt: skip
PLOT = PlotSpec(
    "auc_lost_e3", ("drift",), "steps", "contender", "AUC lost, thousandths",
    decimals=1, ours="hashed",
)  # fmt: skip
UNLIMITED = "unlimited"
HASH = "hash encoding"
CONTENDERS = {
    UNLIMITED: pb.Hashed(),
    "hashed": pb.Hashed(),
    "hashed, seen twice": pb.Hashed(admit=pb.AfterCount(2)),
    HASH: None,
}
Capacities = Mapping[str, int]


class FactorisationMachine(nn.Module):
    """Of the kind that drew the labels: weights of ids and dense values, and of pairs of ids."""

    def __init__(self, embeddings: pb.Embeddings, num_dense: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = nn.Linear(num_dense, 1)

    def forward(self, batch: pb.JaggedBatch) -> Tensor:
        """Logits ``[B]``."""
        embedded = self.embeddings(batch)  # [B, F, D]
        vectors = embedded[..., 1:]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        logits: Tensor = self.dense(batch.dense).squeeze(1) + embedded[..., 0].sum(1) + pairs
        return logits


@dataclass(frozen=True)
class Stream:
    """Samples in the order of time.

    Attributes:
        generator: of them.
        num_steps: that train.
    """

    generator: Generator
    num_steps: int

    def batches(self, first: int, stop: int, size: int = BATCH) -> Iterator[pb.JaggedBatch]:
        """Samples ``first`` to ``stop`` in batches."""
        keys = self.generator.schema.keys
        for chunk in range(first, stop, 128 * BATCH):
            rows, _ = self.generator.samples(chunk, min(128 * BATCH, stop - chunk))
            dense = torch.from_numpy(rows.dense)
            labels = torch.from_numpy(rows.labels.astype(np.float32))
            ids = torch.from_numpy(rows.raw_ids)
            for start in range(0, len(labels), size):
                part = slice(start, start + size)
                ids_FB = ids[part].T.contiguous()
                yield pb.JaggedBatch.from_one_hot(dense[part], keys, ids_FB, labels[part])

    def distinct_ids(self) -> dict[str, int]:
        """How many ids of each table the samples that train have."""
        seen: dict[str, list[Ints]] = {name: [] for name in self.generator.schema.keys}
        for batch in self.batches(0, self.num_steps * BATCH, 128 * BATCH):
            ids_FB = batch.values.numpy().reshape(len(seen), -1)
            for name, ids in zip(seen, ids_FB, strict=True):
                seen[name] = [np.unique(np.concatenate([*seen[name], ids]))]
        return {name: len(ids) for name, (ids,) in seen.items()}


def drift(options: Options) -> Report:
    """The section."""
    load = ForeignLoad()
    steps = QUICK_STEPS if options.quick else STEPS
    every = EVERY * steps // STEPS
    synthetic = SyntheticOptions(
        steps * BATCH + TEST_SAMPLES,
        max_table_rows=TABLE_ROWS,
        raw=True,
        drift=SHARE,
        drift_every=every * BATCH,
    )
    stream = Stream(Generator(synthetic), steps)
    seen = stream.distinct_ids()
    capacities = bounded(seen)
    rows: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small
    try:
        for contender in CONTENDERS:
            options.say(contender)
            rows += measured(stream, contender, seen if contender == UNLIMITED else capacities)
    finally:
        torch.set_num_threads(threads)
    for row in rows:
        others = [each for each in rows if each["steps"] == row["steps"]]
        below = others[0]["auc"] - row["auc"]
        row["rows_share"] = row["rows"] / sum(seen.values())
        row["drift"] = f"{SHARE:.0%} of the hot ids every {every:,} steps"
        if row["contender"] != UNLIMITED:
            row["auc_lost_e3"] = 1000 * below
    notes = [
        f"{steps:,} steps of {BATCH} samples once in the order of time, then a test on the"
        f" {TEST_SAMPLES:,} after them; half the steps: the same in the middle. 26 tables of up to"
        f" {TABLE_ROWS:,} ids at a time, {sum(seen.values()):,} ids ever seen; best possible AUC"
        f" at the end {best_auc(stream):.4f}",
        "`auc_lost_e3`: thousandths of AUC below the unlimited tables",
        f"`rows_share`: of all ids ever seen. Tables of up to {WHOLE:,} ids have a row for each,"
        " the others share the rest. `hit_rate`: of the ids of training, those that had a row",
        "a factorisation machine, as the labels come from one; Adagrad by the rate and"
        " initial accumulator (of five pairs) that are best for the unlimited tables; one thread",
        noise_note(load),
    ]
    title = "AUC where hot ids go and new ones come"
    return Report("hashed", title, rows, COLUMNS, PLOT, notes, provenance())


def bounded(seen: Mapping[str, int]) -> dict[str, int]:
    """Rows of each table, by how many ids it sees: ``ROWS_SHARE`` of all."""
    small = {name: num for name, num in seen.items() if num <= WHOLE}
    large = sum(seen.values()) - sum(small.values())
    share = (ROWS_SHARE * sum(seen.values()) - sum(small.values())) / max(1, large)
    return {name: small.get(name, max(BATCH, int(share * num))) for name, num in seen.items()}


def measured(stream: Stream, contender: str, capacities: Capacities) -> list[Row]:
    """A row for the middle of training, one for its end."""
    kind = CONTENDERS[contender]
    torch.manual_seed(0)
    rows_by = Identity() if kind is None else kind
    tables = [
        pb.Table(name, num, DIM, initializer=INITIAL, rows=rows_by)
        for name, num in capacities.items()
    ]
    embeddings = pb.Embeddings(tables, pb.Adagrad(lr=0.1, initial_accumulator=1e-3))
    model = FactorisationMachine(embeddings, 13)
    optimizer = torch.optim.Adagrad(model.dense.parameters(), lr=0.05)
    modulus = None if kind is not None else torch.tensor(list(capacities.values()))[:, None]
    rows: list[Row] = []
    for begin, stop in pairwise((0, stream.num_steps // 2, stream.num_steps)):
        started = time.perf_counter()
        for batch in encoded(stream.batches(begin * BATCH, stop * BATCH), modulus):
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - started
        row: Row = {
            "contender": contender,
            "steps": stop,
            "rows": sum(capacities.values()),
            "auc": test_auc(model, encoded(stream.batches(*test_of(stop), 8192), modulus)),
            "samples_per_s": (stop - begin) * BATCH / seconds,
        }
        counters = [
            index.counters()
            for index in embeddings.row_indices.values()
            if isinstance(index, HashedIndex)
        ]
        if counters:
            hits = sum(each["hits"] for each in counters)
            row["hit_rate"] = hits / sum(each["lookups"] for each in counters)
            row["evictions"] = sum(each["evictions"] for each in counters)
        rows.append(row)
    return rows


def encoded(batches: Iterator[pb.JaggedBatch], modulus: Tensor | None) -> Iterator[pb.JaggedBatch]:
    """Batches as they are, or with each id's remainder for a row, ``[F, 1]`` many."""
    for batch in batches:
        if modulus is None:
            yield batch
        else:
            ids_FB = batch.values.reshape(len(modulus), -1) % modulus
            yield pb.JaggedBatch.from_one_hot(batch.dense, batch.keys, ids_FB, batch.labels)


def test_of(steps: int) -> tuple[int, int]:
    """The samples after so many steps."""
    return steps * BATCH, steps * BATCH + TEST_SAMPLES


def test_auc(model: nn.Module, batches: Iterator[pb.JaggedBatch]) -> float:
    """Of predictions, nothing learned."""
    meter = TruthMeter()
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            meter.add(model(batch).double().numpy(), batch.labels.numpy().astype(np.uint8))
    model.train()
    return meter.metrics()["auc"]


def best_auc(stream: Stream) -> float:
    """Of the true logits, at the end."""
    first, stop = test_of(stream.num_steps)
    rows, logits = stream.generator.samples(first, stop - first)
    meter = TruthMeter()
    meter.add(logits, rows.labels)
    return meter.metrics()["auc"]
