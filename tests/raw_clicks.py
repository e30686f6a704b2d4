"""A raw click log of every kind of feature, with vocabularies, and a run on it."""

from pathlib import Path

import numpy as np

from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule

SCHEMA = """
label = "clicked"
[dense.price]
[dense.age]
transform = "identity"
[categorical.user]
[categorical.city]
encoding = "hash"
num_buckets = 20
[categorical.slot]
encoding = "integer"
num_buckets = 6
[categorical.price_bin]
column = "price"
binning = "log"
[categorical.tags]
multi_hot = true
"""
RAW_IDS = SCHEMA.replace("[categorical.user]", '[categorical.user]\nencoding = "raw"').replace(
    "[categorical.tags]", '[categorical.tags]\nencoding = "raw"'
)
"""With ids of users and tags that no dictionary knows."""
COLUMNS = ("clicked", "price", "age", "user", "city", "slot", "tags")


def raw_rows(count: int, seed: int = 0, first_user: int = 0) -> list[dict[str, str]]:
    """Rows as a text file holds them.

    Users are skewed, some values are missing, clicks depend on user and tags.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        user = first_user + int(rng.zipf(1.6)) % 60
        tags = rng.integers(0, 9, rng.integers(0, 4))
        click = rng.random() < 1 / (
            1 + np.exp(-(user % 5 - 2 + 0.5 * sum(tag % 3 for tag in tags) - 1))
        )
        row = {
            "clicked": str(int(click)),
            "price": "" if rng.random() < 0.1 else f"{rng.exponential(20):.3f}",
            "age": str(int(rng.integers(15, 80))),
            "user": "" if rng.random() < 0.05 else f"u{user}",
            "city": f"city {rng.integers(40)}",
            "slot": str(int(rng.integers(8))),  # 6 and 7 are unknown
            "tags": "|".join(f"t{tag}" for tag in tags),
        }
        rows.append(row)
    return rows


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    """With a header."""
    lines = [",".join(COLUMNS), *(",".join(row[column] for column in COLUMNS) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prepared(
    folder: Path,
    rows: list[dict[str, str]],
    split: str = "time:0.7/0.15/0.15",
    text: str = SCHEMA,
) -> Path:
    """An encoded dataset of these rows, in order."""
    schema = Schema.from_toml(text)
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = TextSource(
        write_csv(folder.with_suffix(".csv"), rows), schema.separator, schema.quotes
    )
    prepare([source], schema, folder, PrepareOptions(SplitRule.parse(split)))
    return folder
