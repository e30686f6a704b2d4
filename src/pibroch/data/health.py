"""What of a dataset cannot be learned from: unknown and missing ids, labels that are all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.data.dataset import EncodedDataset
from pibroch.data.encode import MISSING_KEY
from pibroch.data.schema import CategoricalFeature
from pibroch.data.splits import SPLITS
from pibroch.data.transform import MISSING_ROW, UNKNOWN_ROW

_MOST_UNKNOWN = 0.5
_MOST_UNKNOWN_INTEGERS = 0.01  # a schema that says which integers there are should be right
_MOST_MISSING = 0.99
_TELLING_SAMPLES = 100
_BLOCK_SAMPLES = 1 << 16
_MOST_TIMES = 1 << 16
_MOST_OUT_OF_ORDER = 0.001  # of pairs; where splits meet, logs are seldom sorted to the second


@dataclass(frozen=True, slots=True)
class Shares:
    """Of all ids that read a table in the training split.

    Attributes:
        num_ids: how many there are.
        unknown: the share that reads the row of unknown values; 0 where ids are raw.
        missing: the share that reads the row of missing values, or has their key.
    """

    num_ids: int
    unknown: float
    missing: float


def shares(dataset: EncodedDataset) -> dict[str, Shares]:
    """How many of the ids that read each table say something; reads all raw ids."""
    counted = _missing_of_raw(dataset)
    result = {}
    for table, readers in dataset.schema.readers.items():
        num_unknown = 0
        if table in counted:
            num_missing, num_ids = np.sum([counted[name] for name in readers], 0).tolist()
        else:
            accessed = dataset.accesses(table)
            num_ids = int(accessed.counts.sum())
            num_unknown, num_missing = (
                int(accessed.counts[accessed.values == row].sum())
                for row in (UNKNOWN_ROW, MISSING_ROW)
            )
        unknown, missing = (count / max(1, num_ids) for count in (num_unknown, num_missing))
        result[table] = Shares(num_ids, unknown, missing)
    return result


def _missing_of_raw(dataset: EncodedDataset) -> dict[str, tuple[int, int]]:
    """Numbers of missing values and of all ids in training, of each feature with raw ids."""
    split = dataset.split("train")
    raw_ids = np.empty((0, 0), np.int64) if split.raw_ids is None else split.raw_ids
    missing = np.zeros(raw_ids.shape[1], np.int64)
    for first in range(0, len(raw_ids), _BLOCK_SAMPLES):
        missing += (raw_ids[first : first + _BLOCK_SAMPLES] == MISSING_KEY).sum(0)
    counts = {key: (int(n), len(split)) for key, n in zip(split.raw_keys, missing, strict=True)}
    for feature in dataset.schema.categorical:
        if feature.is_raw and feature.multi_hot:
            values = split.bags[feature.name].values
            counts[feature.name] = int((values == MISSING_KEY).sum()), len(values)
    return counts


def unknown_ids(dataset: EncodedDataset) -> dict[str, tuple[int, int]]:
    """Numbers of unknown ids and of all ids of each feature, over all splits; reads all ids.

    Features with raw ids have no unknown ones, and are left out.
    """
    known = dataset.known_num_rows
    counts = {f.name: (0, 0) for f in dataset.schema.categorical if f.table in known}
    for name in SPLITS:
        split = dataset.split(name)  # type: ignore[arg-type]  # a tuple of these names
        for feature, (unknown, total) in counts.items():
            ids = split.ids_of(feature)
            counts[feature] = unknown + int((ids == UNKNOWN_ROW).sum()), total + len(ids)
    return counts


def click_rates(
    dataset: EncodedDataset, splits: Sequence[str] = SPLITS
) -> dict[str, dict[str, float | None]]:
    """By binary label, its mean in each split, ``None`` where there are none; reads all labels."""
    targets = dataset.schema.targets
    rates: dict[str, dict[str, float | None]] = {
        label: {} for label, target in targets.items() if target.kind == "binary"
    }
    for name in splits:
        labels = dataset.split(name).labels  # type: ignore[arg-type]  # one of SPLITS
        means = labels.mean(0, dtype=np.float64).reshape(-1) if len(labels) else None
        for place, label in enumerate(targets):
            if label in rates:
                is_there = means is not None and dataset.has_labels
                rates[label][name] = float(means[place]) if is_there else None  # type: ignore[index]
    return rates


def warnings(dataset: EncodedDataset) -> list[str]:
    """What is probably not meant so, a sentence each with what to do about it."""
    of = shares(dataset)
    messages = [warning for f in dataset.schema.owners if (warning := _warning(f, of[f.name]))]
    for label, rates in click_rates(dataset).items():
        for split, rate in rates.items():
            is_telling = split == "train" or dataset.samples[split] >= _TELLING_SAMPLES
            if rate in (0.0, 1.0) and is_telling:
                messages.append(
                    f"all labels of the {split} split are {rate:.0f}: check the column `{label}`"
                )
    messages += _against_time(dataset)
    return messages if dataset.samples["train"] else []


def _against_time(dataset: EncodedDataset) -> Iterator[str]:
    """Whether a split by the order of records is none by their times."""
    rule = dataset.provenance.get("split")
    times = dataset.split("train").event_times
    if not isinstance(rule, dict) or rule.get("kind") != "time" or times is None:
        return
    train = _some(times)
    for name in SPLITS[1:]:
        later = _some(dataset.split(name).event_times)  # type: ignore[arg-type]  # one of SPLITS
        pairs = len(train) * len(later)
        share = int(np.searchsorted(later, train).sum()) / pairs if pairs else 0.0
        if share > _MOST_OUT_OF_ORDER:
            yield (
                f"`{dataset.schema.time}`: of {share:.1%} of all pairs of a training and a {name}"
                " sample the later one trains, as records are not in the order of time: sort them,"
                " give files in that order, or pass --split hash:A/B/C"
            )


def _some(times: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Some of a split's times, sorted: of all parts of it as many."""
    if times is None:
        return np.empty(0, np.int64)
    return np.sort(times[:: max(1, len(times) // _MOST_TIMES)])


def _warning(feature: CategoricalFeature, of: Shares) -> str | None:
    where = f"`{feature.name}`: "
    if not of.num_ids:
        return f"{where}no training sample has an id: check the column `{feature.column}`"
    if of.missing >= _MOST_MISSING:
        return (
            f"{where}{of.missing:.1%} of its training ids are missing: check the column"
            f" `{feature.column}`"
        )
    if (
        feature.encoding == "integer"
        and feature.binning is None
        and of.unknown >= _MOST_UNKNOWN_INTEGERS
    ):
        last = (feature.num_buckets or 0) - 1
        return (
            f"{where}{of.unknown:.1%} of its training ids are no whole numbers from 0 to {last} and"
            " share the row of unknown values: raise `num_buckets`, or use another encoding"
        )
    if of.unknown >= _MOST_UNKNOWN:
        return (
            f"{where}{of.unknown:.1%} of its training ids are unknown, seen fewer than"
            f" {feature.min_count} times or cut by `max_rows`: lower `min_count`, or use `encoding"
            ' = "hash"`'
        )
    return None
