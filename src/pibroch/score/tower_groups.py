"""Groups of features for towers, from a trained model and some samples."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pibroch.data import EncodedDataset
from pibroch.data.batch import JaggedBatch
from pibroch.data.loader import Loader
from pibroch.errors import ConfigError
from pibroch.planner.towers import (
    Balance,
    Centres,
    Floats,
    Similarity,
    Strategy,
    coordinates,
    partition,
)
from pibroch.serve.predictor import Predictor
from pibroch.storage import storage_errors
from pibroch.train.session import build_tables

BATCH_SIZE = 2048


@dataclass(frozen=True, slots=True)
class FeatureGroups:
    """Towers that were found.

    Attributes:
        features: in the order of the model.
        groups: names of each tower's features.
        similarity: of features, ``[F, F]``.
        num_bytes: of each feature's table.
        strategy: by which they were found.
    """

    features: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    similarity: Floats
    num_bytes: Mapping[str, int]
    strategy: Strategy

    def bytes_of(self, group: Sequence[str]) -> int:
        """Of the tables of a tower."""
        return sum(self.num_bytes[name] for name in group)

    @property
    def tower_of(self) -> list[int]:
        """Of each feature."""
        number = {name: tower for tower, group in enumerate(self.groups) for name in group}
        return [number[name] for name in self.features]

    @property
    def inside(self) -> float:
        """Mean similarity of two features of one tower."""
        return self._mean(same=True)

    @property
    def between(self) -> float:
        """Mean similarity of two features of different towers."""
        return self._mean(same=False)

    def _mean(self, *, same: bool) -> float:
        tower = np.array(self.tower_of)
        chosen = ((tower[:, None] == tower) == same) & ~np.eye(len(tower), dtype=np.bool_)
        return float(self.similarity[chosen].mean()) if chosen.any() else float("nan")


def group_features(
    predictor: Predictor,
    dataset: EncodedDataset,
    num_towers: int,
    num_samples: int,
    strategy: Strategy,
    balance: Balance = Balance(),
    categories: Sequence[str] | None = None,
    *,
    weigh_bytes: bool = True,
    centred: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> FeatureGroups:
    """Group a model's features by their embeddings of some training samples.

    Args:
        predictor: of a trained model.
        dataset: that it was trained on.
        num_towers: wanted.
        num_samples: to look at.
        strategy: what features of a tower are to each other.
        balance: how even towers are.
        categories: of each feature, which towers do not mix.
        weigh_bytes: balance the bytes of tables; else lookups, that is ids a sample.
        centred: compare embeddings less the mean of their feature, see :class:`Centres`; costs a
            second look at the samples.
        advance: is called with the samples that were looked at since.

    Raises:
        ConfigError: for numbers of towers that cannot be.
    """
    features = predictor.features
    centres = None
    if centred:
        means = Centres(len(features), predictor.dim)
        for part in _some(dataset, features, num_samples):
            means.add(predictor.embed(part))
        centres = means.mean()
    similarity = Similarity(len(features), centres)
    lookups = np.zeros(len(features))
    seen = 0
    for part in _some(dataset, features, num_samples):
        similarity.add(predictor.embed(part))
        lookups += part.lengths().view(len(features), -1).sum(1).numpy()
        advance(min(part.batch_size, num_samples - seen))
        seen += part.batch_size
    tables = build_tables(predictor.config, dataset.num_rows, dataset.schema.readers)
    num_bytes = {
        name: 4 * table.num_rows * predictor.config.model.dim
        for table in tables
        for name in table.features
    }
    weights = [float(num_bytes[name]) for name in features] if weigh_bytes else lookups.tolist()
    similarities = similarity.mean()
    groups = partition(similarities, weights, num_towers, strategy, balance, categories)
    named = tuple(tuple(features[number] for number in group) for group in groups)
    return FeatureGroups(features, named, similarities, num_bytes, strategy)


def _some(
    dataset: EncodedDataset, features: Sequence[str], num_samples: int
) -> Iterator[JaggedBatch]:
    """Batches of the training split with so many samples, or all."""
    seen = 0
    for batch in Loader(dataset.split("train"), BATCH_SIZE):
        yield batch.select(tuple(features))
        seen += batch.batch_size
        if seen >= num_samples:
            break


def read_categories(path: Path, features: Sequence[str]) -> list[str]:
    """The category of each feature, from a TOML file with a list of names for each.

    Raises:
        ConfigError: when it is no such file, or a feature is in none or in two.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        pairs = [(name, category) for category, names in content.items() for name in list(names)]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} as categories: {error}", "a TOML file such as user = ['C1', 'C2']"
        ) from error
    for name in features:
        count = sum(listed == name for listed, _ in pairs)
        if count != 1:
            raise ConfigError(f"feature {name!r} in {count} categories", "in one", f"see {path}")
    return [dict(pairs)[name] for name in features]


def write_groups(path: Path, groups: FeatureGroups) -> None:
    """Write the file that ``model.towers.groups`` takes.

    Raises:
        StorageError: when it cannot be written.
    """
    content = {
        "towers": [list(group) for group in groups.groups],
        "strategy": groups.strategy,
        "similarity_inside": groups.inside,
        "similarity_between": groups.between,
    }
    _write(path, json.dumps(content, indent=1) + "\n")


def write_map(path: Path, groups: FeatureGroups) -> None:
    """Write a page with the map of features by their distances.

    Raises:
        StorageError: when it cannot be written.
    """
    from pibroch.observability.plots import map_plot

    svg = map_plot(
        coordinates(groups.similarity, groups.strategy).tolist(), groups.features, groups.tower_of
    )
    rows = "".join(
        f"<tr><td>{n}</td><td>{', '.join(group)}</td></tr>" for n, group in enumerate(groups.groups)
    )
    _write(
        path,
        "<!doctype html><meta charset=utf-8><title>Towers</title><h1>Towers"
        f" ({groups.strategy})</h1>{svg}<table>{rows}</table>",
    )


def _write(path: Path, text: str) -> None:
    with storage_errors(path, "a place to write to", ""):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
