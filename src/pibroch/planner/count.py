"""Count a prepared dataset, in one streaming pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pibroch.data.dataset import EncodedDataset, SplitName
from pibroch.data.loader import Loader
from pibroch.errors import ConfigError, DataError
from pibroch.planner.profile import AccessProfile, ProfileCounter, Progress


@dataclass(frozen=True, slots=True)
class CountOptions:
    """How a dataset is counted.

    Attributes:
        batch_size: of one rank.
        split: which samples.
        first: count this many samples of the split alone, in their order; all when absent.
        shuffle: count batches in the order in which training shuffles them.
        seed: of that order.
    """

    batch_size: int = 1024
    split: SplitName = "train"
    first: int | None = None
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.first is not None and self.first < 1):
            raise ConfigError(
                f"batch size {self.batch_size}, first {self.first}",
                "at least 1 each",
                "choose larger ones",
            )
        if self.shuffle and self.first is not None:
            raise ConfigError(
                "first samples of a shuffled split", "one of the two", "leave one of them out"
            )


def count_dataset(
    dataset: EncodedDataset,
    options: CountOptions | None = None,
    features_of: Mapping[str, Sequence[str]] | None = None,
    progress: Progress | None = None,
) -> AccessProfile:
    """Count a prepared dataset exactly, in one streaming pass.

    Args:
        dataset: which.
        options: batch size, split, order.
        features_of: by table the features that read it; by default as the schema says.
        progress: called with the stage and the fraction that is done.

    Raises:
        DataError: when a feature is not there or has raw ids, tables of one name differ in size, or
            there are no samples.
    """
    options = options or CountOptions()
    progress = progress or (lambda stage, fraction: None)
    readers = dataset.schema.readers
    rows_of = {f: dataset.num_rows[table] for table, names in readers.items() for f in names}
    features_of = features_of or readers
    num_rows = {}
    for table, features in features_of.items():
        missing = [feature for feature in features if feature not in rows_of]
        if missing:
            raise DataError(
                f"feature {missing[0]!r} of table {table!r}",
                f"one of {', '.join(rows_of)}",
            )
        if raw := [feature for feature in features if rows_of[feature] is None]:
            raise DataError(
                f"feature {raw[0]!r} of table {table!r}, whose ids are raw",
                "ids that are rows, which a plan places",
                "plan for data that are prepared with a vocabulary, or as a hash",
            )
        num_rows[table] = max(rows_of[feature] or 0 for feature in features)
    split = dataset.split(options.split)
    total = min(len(split), options.first or len(split))
    if not total:
        raise DataError(
            f"split {options.split} without samples", "at least one sample", "choose another split"
        )
    counter = ProfileCounter(num_rows)
    loader = Loader(
        split, min(options.batch_size, total), shuffle=options.shuffle, seed=options.seed
    )
    for batch in loader:
        take = min(batch.batch_size, total - counter.num_samples)
        values = batch.values.numpy()
        offsets = batch.offsets.numpy()
        size = batch.batch_size
        place = {key: i for i, key in enumerate(batch.keys)}
        bounds = {key: (offsets[i * size], offsets[i * size + take]) for key, i in place.items()}
        ids = {
            t: [values[slice(*bounds[feature])] for feature in fs] for t, fs in features_of.items()
        }
        counter.add(ids, take)
        progress("counting", counter.num_samples / total)
        if counter.num_samples >= total:
            break
    origin = {
        "split": options.split,
        "order": "shuffled" if options.shuffle else "as stored",
        "first": options.first,
    }
    return counter.profile(options.batch_size, dataset.digest, origin)
