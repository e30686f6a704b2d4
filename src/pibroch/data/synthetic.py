"""Criteo-shaped data with a planted truth, as skewed as the real log.

Thirteen dense values and 26 categories. Ids have the measured skew of each Criteo table
(:mod:`pibroch.data.skew`), and rows of a table are ordered by popularity. Labels come from a
factorisation machine (:mod:`pibroch.data.planted`); with histories, also from how many items of a
sequence are of the kind of the item in question. ``truth.json`` and the manifest say how well the
best possible model does; only by luck is one better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.data.counted import RowCounts
from pibroch.data.drift import Drift
from pibroch.data.encode import fields_of, raw_ids
from pibroch.data.kernels.sampling import alias_table, draw_ids, stream_keys, uniform
from pibroch.data.kernels.text import hash_fields
from pibroch.data.planted import (
    DEVIATIONS,
    GROUPED_DEVIATIONS,
    Planted,
    TruthMeter,
    calibrated,
    draw_effects,
    sigmoid,
)
from pibroch.data.publish import clear, publish, refuse_existing, work_folder
from pibroch.data.schema import CategoricalFeature, DenseFeature, Schema
from pibroch.data.skew import CRITEO_SKEW, rank_probabilities
from pibroch.data.splits import SPLITS, TRAIN, SplitRule
from pibroch.data.storage import write_json
from pibroch.data.transform import FIRST_ROW
from pibroch.data.writer import DatasetWriter, EncodedRows
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Array
from pibroch.version import __version__

_CHUNK_SAMPLES = 65_536
_PILOT_SAMPLES = 65_536
_PILOT_FIRST = 1 << 40  # far behind any sample that is ever generated
_BAG_LENGTHS = (3, 2, 8, 1, 5)
_MULTI_HOT_EVERY = 3
_ITEM = 1
"""The place of C2, whose table histories read: some 500 values, the first of which takes 11 %."""
_NUM_KINDS = 8
"""Of items, which only the history's effect tells apart."""
_HISTORY_DEVIATION = 1.0
"""Of that effect in logits."""
# Mean of log(1 + x) and share of missing values of I1 to I13 in the Criteo sample.
_DENSE_MEANS = (0.87, 2.03, 2.15, 1.70, 7.28, 3.40, 1.64, 2.04, 3.54, 0.40, 0.93, 0.29, 1.73)
_DENSE_MISSING = (
    0.451,
    0.0,
    0.213,
    0.214,
    0.026,
    0.223,
    0.043,
    0.001,
    0.043,
    0.451,
    0.043,
    0.765,
    0.214,
)
_LARGEST_PAIRED = 60
"""Criteo tables of up to this many values interact.

Their pairs are seen often enough to be learned.
"""
_LONGEST_BAG = 2 * max(_BAG_LENGTHS)
Bags = list[tuple[NDArray[np.int64] | None, NDArray[np.int32]]]
"""For each feature the lengths (``None``: one id each) and the ids, from 0 on."""


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """What to generate.

    Attributes:
        num_samples: over all splits.
        seed: the same options give the same data.
        max_table_rows: Criteo's tables, none larger than this.
        table_rows: instead, all 26 tables of this size.
        multi_hot: every third category holds zero to several ids.
        split: which samples train, validate and test.
        groups: of features that interact with each other and with no others; then small tables all
            do. 0 for none.
        raw: ids are keys, see :func:`pibroch.data.encode.raw_ids`, and not rows.
        history: of up to so many items a sample has a sequence, ``history``, that reads the table
            of C2. 0 for none.
        drift: share of each table's hot ids that is replaced by new ones every so often, see
            :mod:`pibroch.data.drift`. With ``raw`` alone; 0 for none.
        drift_every: samples between two such times.
        turn: samples in which preferences make a quarter turn: effects are then others altogether,
            as large, and after a half turn the opposite of the first ones. 0 for none.
    """

    num_samples: int
    seed: int = 0
    max_table_rows: int = 10_000
    table_rows: int | None = None
    multi_hot: bool = False
    split: SplitRule = field(default_factory=SplitRule)
    groups: int = 0
    raw: bool = False
    history: int = 0
    drift: float = 0.0
    drift_every: int = 1_000_000
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """Samples as a raw log has them.

    Attributes:
        counts: numbers before the transform, int64 ``[R, n]``.
        ids: numbers of ids from 0 on, int32 ``[R, F]``.
        labels: uint8 ``[R]``.
        logits: true ones, float64 ``[R]``.
    """

    counts: NDArray[np.int64]
    ids: NDArray[np.int32]
    labels: NDArray[np.uint8]
    logits: NDArray[np.float64]


def planted_groups(options: SyntheticOptions) -> list[list[str]]:
    """The planted groups of features by name, shuffled; ``None`` when none are planted.

    >>> planted_groups(SyntheticOptions(1, groups=9))[0]
    ['C25', 'C3', 'C21']
    """
    order = (
        np.random.default_rng([options.seed, options.groups]).permutation(len(CRITEO_SKEW)).tolist()
    )
    return [
        [f"C{number + 1}" for number in order[first :: options.groups]]
        for first in range(options.groups)
    ]


def synthesize(
    options: SyntheticOptions,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[str, float], None] = lambda stage, fraction: None,
) -> dict[str, dict[str, float]]:
    """Generate a dataset in the folder ``out``; memory is bounded whatever its size.

    Returns:
        The best possible metrics per split, see :meth:`TruthMeter.metrics`.

    Raises:
        ConfigError: when an option makes no sense.
        DataError: when ``out`` is taken.
        StorageError: when the disk refuses.
    """
    refuse_existing(out, overwrite)
    generator = Generator(options)
    work = out.with_name(out.name + ".partial")
    with work_folder(work, None):
        writer = DatasetWriter(work / "dataset", generator.schema)
        meters = {split: TruthMeter() for split in SPLITS}
        counts = {name: RowCounts(rows) for name, rows in generator.num_rows.items() if rows}
        for first in range(0, options.num_samples, _CHUNK_SAMPLES):
            count = min(_CHUNK_SAMPLES, options.num_samples - first)
            rows, logits = generator.samples(first, count)
            assigned = options.split.assign(first, count, options.num_samples)
            for split_id in np.unique(assigned):
                mask = assigned == split_id
                name = SPLITS[split_id]
                writer.append(name, rows.chosen(mask))
                meters[name].add(logits[mask], rows.labels[mask])
                if split_id == TRAIN and counts:
                    rows.chosen(mask).add_counts(generator.schema, counts)
            progress("generate", (first + count) / options.num_samples)
        for name, of_table in counts.items():
            writer.write_table(name, of_table)
        truth = {split: meter.metrics() for split, meter in meters.items() if meter.metrics()}
        provenance = {"generator": asdict(options), "pibroch": __version__}
        if options.groups:
            write_json(work / "dataset" / "groups.json", {"towers": planted_groups(options)})
        writer.finish(generator.num_rows, provenance, truth)
        write_json(work / "dataset" / "truth.json", truth)
        publish(work / "dataset", out)
        clear(work)
    return truth


class Generator:
    """Draws samples; sample ``i`` is the same however the samples are cut into chunks."""

    def __init__(self, options: SyntheticOptions) -> None:
        if options.num_samples < 1 or options.max_table_rows < 1 or (options.table_rows or 1) < 1:
            raise ConfigError(
                f"{options.num_samples} samples, tables of {options.max_table_rows} rows",
                "at least 1",
                "raise them",
            )
        if options.history < 0:
            raise ConfigError(f"histories of {options.history} items", "at least 0, for none")
        if not 0 <= options.groups <= len(CRITEO_SKEW):
            raise ConfigError(
                f"{options.groups} planted groups",
                f"at most {len(CRITEO_SKEW)}, the number of features",
            )
        if not 0 <= options.drift <= 1 or options.drift_every < 1:
            raise ConfigError(
                f"a share of {options.drift:g} of hot ids replaced every {options.drift_every}"
                " samples",
                "a share from 0 to 1, every sample at most",
            )
        if options.turn < 0:
            raise ConfigError(f"a turn in {options.turn} samples", "at least 1, or 0 for none")
        if options.drift and not options.raw:
            raise ConfigError(
                "drift without raw ids", "ids that are keys, of which new ones come", "add --raw"
            )
        self._options = options
        sizes = [
            options.table_rows or min(skew.num_values, options.max_table_rows)
            for skew in CRITEO_SKEW
        ]
        self.schema = _schema(sizes, options)
        self.num_rows = {f.name: f.fixed_num_rows for f in self.schema.owners}
        self._drifts = [
            Drift(size, options.drift, options.drift_every, options.num_samples, options.seed)
            for size in sizes
        ]
        most_ids = max(len(drift.places) for drift in self._drifts)
        self._key_of_id = _keys(most_ids) if options.raw else None
        bag_lengths = cycle(_BAG_LENGTHS)
        self._lengths = [next(bag_lengths) if f.multi_hot else 0 for f in self.schema.owners]
        num_keys = 2 * len(sizes) + 2 * len(_DENSE_MEANS) + 1
        *keys, length_key, items_key = stream_keys(options.seed, num_keys + 2)
        self._keys = keys
        self._length_key = length_key
        self._items_key = items_key
        probabilities = [
            rank_probabilities(skew, size) for skew, size in zip(CRITEO_SKEW, sizes, strict=True)
        ]
        self._aliases = [alias_table(p) for p in probabilities]
        of_ids = [p[drift.places] for p, drift in zip(probabilities, self._drifts, strict=True)]
        self._history_mean = 0.0
        self._history_scale = 0.0
        self._planted, self._mean = self._plant(of_ids, np.random.default_rng(options.seed))
        self._later: tuple[Planted, float] | None = None
        if options.turn:
            self._later = self._plant(of_ids, np.random.default_rng([options.seed, options.turn]))

    def samples(self, first: int, count: int) -> tuple[EncodedRows, NDArray[np.float64]]:
        """Samples ``first`` to ``first + count`` and their true logits ``[count]``."""
        dense = self._dense(first, count)
        bags = self._bags(first, count)
        logits = self._logits(first, dense, bags)
        sequences: dict[str, tuple[NDArray[np.int64], Array]] = {}
        if self._options.history:
            lengths, items = self._history(first, count)
            logits += self._history_effect(lengths, items, bags[_ITEM][1])
            sequences["history"] = lengths, self._encoded(items)
        labels = self._labels(first, logits)
        names = list(self.num_rows)
        one_hot = np.stack([self._encoded(ids) for lengths, ids in bags if lengths is None], 1)
        jagged = {
            names[i]: (lengths, self._encoded(ids))
            for i, (lengths, ids) in enumerate(bags)
            if lengths is not None
        }
        jagged |= sequences
        if self._options.raw:
            return EncodedRows(labels, dense, one_hot[:, :0], jagged, one_hot), logits
        return EncodedRows(labels, dense, one_hot, jagged), logits

    def events(self, first: int, count: int) -> Events:
        """The same samples as a raw log has them; with one id a feature, and no histories."""
        counts = self._counts(first, count)
        bags = self._bags(first, count)
        logits = self._logits(first, np.log1p(counts).astype(np.float32), bags)
        ids = np.stack([ids for _, ids in bags], 1)
        return Events(counts.astype(np.int64), ids, self._labels(first, logits), logits)

    def _logits(self, first: int, dense: NDArray[np.float32], bags: Bags) -> NDArray[np.float64]:
        """True logits ``[count]``, histories aside."""
        sample_major = _sample_major(bags, len(dense))
        logits = self._planted.logits(dense, *sample_major)
        if self._later is None:
            return logits
        angle = np.arange(first, first + len(dense)) * (np.pi / 2 / self._options.turn)
        planted, mean = self._later
        later = planted.logits(dense, *sample_major) - mean
        logits = logits - self._mean
        turned: NDArray[np.float64] = self._mean + np.cos(angle) * logits + np.sin(angle) * later
        return turned

    def _labels(self, first: int, logits: NDArray[np.float64]) -> NDArray[np.uint8]:
        drawn = uniform(self._keys[-1], first, len(logits)) < sigmoid(logits)
        return drawn.astype(np.uint8)

    def _encoded(self, ids: NDArray[np.int32]) -> Array:
        """Numbers from 0 on as rows, or as keys."""
        return FIRST_ROW + ids if self._key_of_id is None else self._key_of_id[ids]

    def _plant(
        self, probabilities: list[NDArray[np.float64]], rng: np.random.Generator
    ) -> tuple[Planted, float]:
        """Draw the effects, then set scales and bias by a pilot of samples; its mean logit.

        Args:
            probabilities: of all ids that ever appear, by table.
            rng: draws.
        """
        sizes = [len(p) for p in probabilities]
        names = list(self.num_rows)
        groups = planted_groups(self._options)
        paired = [skew.num_values <= _LARGEST_PAIRED for skew in CRITEO_SKEW]
        group_of: dict[str, tuple[int, int]] = {}
        if groups:
            paired = [size <= _LARGEST_PAIRED for size in sizes]
            group_of = {name: (n, len(groups)) for n, group in enumerate(groups) for name in group}
        pilot = self._dense(_PILOT_FIRST, _PILOT_SAMPLES)
        planted = Planted(
            first_row=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64),
            effects=np.concatenate(
                [
                    draw_effects(p, pairs, rng, group_of.get(name))
                    for p, pairs, name in zip(probabilities, paired, names, strict=True)
                ]
            ),
            bag_scale=np.array([1 / max(1, length) for length in self._lengths], np.float32),
            dense_effects=rng.standard_normal(len(_DENSE_MEANS)).astype(np.float32),
            dense_mean=pilot.mean(0),
            dense_scale=1 / np.maximum(pilot.std(0), 1e-3),
        )
        bags = self._bags(_PILOT_FIRST, _PILOT_SAMPLES)
        linear, pairs = planted.parts(pilot, *_sample_major(bags, _PILOT_SAMPLES))
        deviations = GROUPED_DEVIATIONS if groups else DEVIATIONS
        effect: NDArray[np.float64] | float = 0.0
        if self._options.history:
            sequences = self._history(_PILOT_FIRST, _PILOT_SAMPLES)
            alike = _log_alike(*sequences, bags[_ITEM][1])
            self._history_mean = alike.mean()
            self._history_scale = _HISTORY_DEVIATION / alike.std()
            effect = self._history_effect(*sequences, bags[_ITEM][1])
        linear_scale, pair_scale, bias = calibrated(linear, pairs, deviations, effect)
        scaled = replace(planted, linear_scale=linear_scale, pair_scale=pair_scale, bias=bias)
        mean = bias + linear_scale * float(linear.mean()) + pair_scale * float(pairs.mean())
        return scaled, mean

    def _history(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Lengths and items of the sequences, from 0 on."""
        longest = self._options.history
        lengths = np.floor(uniform(self._length_key, first, count) * (longest + 1))
        all_items = draw_ids(
            self._items_key, first * longest, count * longest, *self._aliases[_ITEM]
        ).reshape(count, longest)
        lengths = lengths.astype(np.int64)
        items = all_items[np.arange(longest) < lengths[:, None]]
        samples = np.repeat(np.arange(first, first + count), lengths)
        return lengths, self._drifts[_ITEM].ids_at(items, samples)

    def _history_effect(
        self, lengths: NDArray[np.int64], items: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        """What the sequences add to logits, float64 ``[count]``."""
        return self._history_scale * (_log_alike(lengths, items, targets) - self._history_mean)

    def _dense(self, first: int, count: int) -> NDArray[np.float32]:
        """Transformed dense values ``[count, n]``: log(1 + c) of counts c."""
        return np.log1p(self._counts(first, count)).astype(np.float32)

    def _counts(self, first: int, count: int) -> NDArray[np.float64]:
        """Whole numbers ``[count, n]`` with exponential logarithms, 0 where missing."""
        columns = []
        keys = self._keys[2 * len(self.num_rows) :]
        for i, (mean, missing) in enumerate(zip(_DENSE_MEANS, _DENSE_MISSING, strict=True)):
            logarithm = -mean * np.log1p(-uniform(keys[2 * i], first, count))
            values = np.floor(np.expm1(np.minimum(logarithm, 16.0)))
            columns.append(np.where(uniform(keys[2 * i + 1], first, count) < missing, 0.0, values))
        return np.stack(columns, 1)

    def _bags(self, first: int, count: int) -> Bags:
        """For each feature the lengths (``None``: one id each) and the ids, from 0 on."""
        bags: Bags = []
        samples = np.arange(first, first + count)
        for i, (length, (keep, alias)) in enumerate(zip(self._lengths, self._aliases, strict=True)):
            if not length:
                places = draw_ids(self._keys[2 * i], first, count, keep, alias)
                bags.append((None, self._drifts[i].ids_at(places, samples)))
                continue
            lengths = np.floor(
                uniform(self._keys[2 * i + 1], first, count) * (2 * length + 1)
            ).astype(np.int64)
            all_ids = draw_ids(
                self._keys[2 * i], first * _LONGEST_BAG, count * _LONGEST_BAG, keep, alias
            )
            used = np.arange(_LONGEST_BAG) < lengths[:, None]
            places = all_ids.reshape(count, _LONGEST_BAG)[used]
            bags.append((lengths, self._drifts[i].ids_at(places, np.repeat(samples, lengths))))
        return bags


def _keys(count: int) -> NDArray[np.int64]:
    """Keys of the numbers from 0 on, as they have in a raw log."""
    return raw_ids(hash_fields(*fields_of([str(number).encode() for number in range(count)])))


def _log_alike(
    lengths: NDArray[np.int64], items: NDArray[np.int32], targets: NDArray[np.int32]
) -> NDArray[np.float64]:
    """The logarithm of 1 and the number of a sequence's items of the target's kind.

    >>> _log_alike(np.array([2, 0]), np.array([9, 3]), np.array([1, 3])).round(2).tolist()
    [0.69, 0.0]
    """
    samples = np.repeat(np.arange(len(lengths)), lengths)
    is_alike = items % _NUM_KINDS == targets[samples] % _NUM_KINDS
    return np.log1p(np.bincount(samples[is_alike], minlength=len(lengths)))


def _schema(sizes: list[int], options: SyntheticOptions) -> Schema:
    sequences: tuple[CategoricalFeature, ...] = ()
    if options.history:
        sequence = CategoricalFeature(
            name="history",
            column="history",
            multi_hot=True,
            max_length=options.history,
            shares=f"C{_ITEM + 1}",
        )
        sequences = (sequence,)
    return Schema(
        label="label",
        dense=tuple(
            DenseFeature(name=f"I{i + 1}", column=f"I{i + 1}") for i in range(len(_DENSE_MEANS))
        ),
        categorical=tuple(
            CategoricalFeature(
                name=f"C{i + 1}",
                column=f"C{i + 1}",
                encoding="raw" if options.raw else "integer",
                num_buckets=None if options.raw else size,
                multi_hot=options.multi_hot and i % _MULTI_HOT_EVERY == _MULTI_HOT_EVERY - 1,
            )
            for i, size in enumerate(sizes)
        )
        + sequences,
    )


def _sample_major(bags: Bags, count: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """All ids in sample-major order ``[V]`` and the start of each bag ``[count * F + 1]``."""
    if all(lengths is None for lengths, _ in bags):
        ids = np.stack([ids for _, ids in bags], 1)
        return ids.reshape(-1), np.arange(ids.size + 1)
    lengths_RF = np.stack([np.ones(count, np.int64) if n is None else n for n, _ in bags], 1)
    starts = np.concatenate([[0], np.cumsum(lengths_RF.reshape(-1))])
    merged = np.empty(starts[-1], np.int32)
    for i, (_, ids) in enumerate(bags):
        lengths = lengths_RF[:, i]
        within = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        merged[np.repeat(starts[:-1].reshape(count, -1)[:, i], lengths) + within] = ids
    return merged, starts
