"""What of a dataset cannot be learned from: unknown and missing ids, labels that are all alike."""

from __future__ import annotations

from dataclasses import dataclass

from pibroch.data.dataset import EncodedDataset
from pibroch.data.schema import CategoricalFeature
from pibroch.data.splits import SPLITS
from pibroch.data.transform import MISSING_ROW, UNKNOWN_ROW

_MOST_UNKNOWN = 0.5
_MOST_UNKNOWN_INTEGERS = 0.01  # a schema that says which integers there are should be right
_MOST_MISSING = 0.99
_TELLING_SAMPLES = 100


@dataclass(frozen=True, slots=True)
class Shares:
    """Of all ids of a feature in the training split.

    Attributes:
        num_ids: how many there are.
        unknown: the share that reads the row of unknown values.
        missing: the share that reads the row of missing values.
    """

    num_ids: int
    unknown: float
    missing: float


def shares(dataset: EncodedDataset, feature: str) -> Shares:
    """How many of a feature's ids say something."""
    counts = dataset.access_counts(feature)
    num_ids = int(counts.sum())
    unknown, missing = (int(counts[row]) / max(1, num_ids) for row in (UNKNOWN_ROW, MISSING_ROW))
    return Shares(num_ids, unknown, missing)


def unknown_ids(dataset: EncodedDataset) -> dict[str, tuple[int, int]]:
    """Numbers of unknown ids and of all ids of each feature, over all splits; reads all ids."""
    one_hot = [feature.name for feature in dataset.schema.categorical if not feature.multi_hot]
    counts = dict.fromkeys(dataset.schema.keys, (0, 0))
    for name in SPLITS:
        split = dataset.split(name)  # type: ignore[arg-type]  # a tuple of these names
        arrays = {feature: split.ids[:, place] for place, feature in enumerate(one_hot)}
        for feature, ids in {
            **arrays,
            **{key: bags.values for key, bags in split.bags.items()},
        }.items():
            unknown, total = counts[feature]
            counts[feature] = unknown + int((ids == UNKNOWN_ROW).sum()), total + len(ids)
    return counts


def click_rates(dataset: EncodedDataset) -> dict[str, float | None]:
    """Mean of the labels of each split, ``None`` where there are none; reads all labels."""
    rates: dict[str, float | None] = {}
    for name in SPLITS:
        labels = dataset.split(name).labels  # type: ignore[arg-type]  # a tuple of these names
        rates[name] = float(labels.mean()) if len(labels) and dataset.has_labels else None
    return rates


def warnings(dataset: EncodedDataset) -> list[str]:
    """What is probably not meant so, a sentence each with what to do about it."""
    messages = [
        warning
        for f in dataset.schema.categorical
        if (warning := _warning(f, shares(dataset, f.name)))
    ]
    for split, rate in click_rates(dataset).items():
        if rate in (0.0, 1.0) and (split == "train" or dataset.samples[split] >= _TELLING_SAMPLES):
            messages.append(
                f"all labels of the {split} split are {rate:.0f}: check the column"
                f" `{dataset.schema.label}`"
            )
    return messages if dataset.samples["train"] else []


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
