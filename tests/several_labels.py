"""Clicks of users with two labels, weights and groups, whose truth a model can learn."""

from pathlib import Path

import numpy as np

from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource

SCHEMA = """
labels = ["click", "seconds"]
weight = "importance"
group = "user"

[target.click]
values = { no = 0, yes = 1 }
[target.seconds]
kind = "number"

[dense.age]
transform = "identity"
[categorical.user]
encoding = "hash"
num_buckets = 200
[categorical.item]
min_count = 1
"""


def records(count: int = 900, seed: int = 1) -> list[list[str]]:
    """Lines of ``click,seconds,importance,user,item,age``; seconds and clicks go together."""
    rng = np.random.default_rng(seed)
    of_user = rng.normal(size=40)
    of_item = rng.normal(size=25)
    users = rng.integers(0, 40, count)
    items = rng.integers(0, 25, count)
    liking = (of_user[users] + of_item[items]) / 2**0.5 + 0.3 * rng.normal(size=count)
    return [
        [
            "yes" if liking[i] > 0.4 else "no",
            f"{2 + liking[i]:.4f}",
            f"{rng.choice([0, 0.5, 1, 3]):g}",
            f"u{users[i]}",
            f"i{items[i]}",
            f"{rng.normal():.3f}",
        ]
        for i in range(count)
    ]


def prepared(folder: Path, changes: str = "", count: int = 900) -> Path:
    """The dataset of these records.

    Args:
        folder: for the text and the dataset.
        changes: of the schema, as ``label = "click"`` in place of the labels; all when empty.
        count: of records.
    """
    text = folder / "clicks.csv"
    header = "click,seconds,importance,user,item,age"
    text.write_text("\n".join([header, *(",".join(each) for each in records(count))]) + "\n")
    schema = Schema.from_toml(changes or SCHEMA)
    source = TextSource(text, schema.separator, schema.quotes, schema.columns)
    prepare([source], schema, folder / "dataset", PrepareOptions())
    return folder / "dataset"
