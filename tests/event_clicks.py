"""A small dataset whose events have times, of which few are much younger than all others."""

from pathlib import Path

import numpy as np

from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule

SCHEMA = """
label = "y"
time = "at"
[dense.size]
[categorical.user]
encoding = "hash"
num_buckets = 40
[categorical.item]
encoding = "hash"
num_buckets = 60
"""
WINDOWS = ["train.windows={seconds=2, lateness_seconds=30, auc=[0.99, 1.0], least_samples=5}"]


def prepared_events(folder: Path, num_events: int = 3000) -> Path:
    """Times in seconds, so skewed that shuffled steps close window after window."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 30, num_events)
    items = rng.integers(0, 50, num_events)
    at = rng.exponential(8.0, num_events) + 1_700_000_000
    clicks = rng.random(num_events) < 1 / (1 + np.exp(-(users % 5 - items % 3)))
    lines = [
        f"{int(click)},{time:.3f},{item / 7:.2f},u{user},i{item}"
        for click, time, user, item in zip(clicks, at, users, items, strict=True)
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".csv")
    path.write_text("\n".join(["y,at,size,user,item", *lines]) + "\n")
    schema = Schema.from_toml(SCHEMA)
    source = TextSource(path, schema.separator, schema.quotes)
    prepare([source], schema, folder, PrepareOptions(SplitRule.parse("time:0.8/0.1/0.1")))
    return folder
