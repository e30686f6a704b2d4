"""What is served: a model on generated raw rows, as exports, and requests with such rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import pibroch as pb
from pibroch.config.recipes import check_config
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.observability.records import FanOut
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory

NUM_DENSE = 13
NUM_TABLES = 26
DIM = 16
DENSE = [f"I{place}" for place in range(1, NUM_DENSE + 1)]
TABLES = [f"C{place}" for place in range(1, NUM_TABLES + 1)]
RawRow = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class ServingCase:
    """A model and what it is asked.

    Attributes:
        rows: raw ones, as requests have them.
        float32: the export that peers read, with ``vocabulary.json``.
        int8: the export that is served.
        scores: of the rows, by the float32 export.
        checkpoints: of the run, rising; the first is full, those behind it say what changed since.
    """

    rows: list[RawRow]
    float32: Path
    int8: Path
    scores: list[float]
    checkpoints: list[Path]

    def body(self, number: int, num_rows: int) -> bytes:
        """The number-th request."""
        chosen = [
            self.rows[(number * num_rows + place) % len(self.rows)] for place in range(num_rows)
        ]
        return json.dumps({"rows": chosen}).encode()


def make_case(
    folder: Path, num_rows: int, num_ids: int, steps: int = 20, checkpoint_every: int = 10
) -> ServingCase:
    """Generate rows of thirteen numbers and of 26 ids, each from ``num_ids`` skewed ones.

    Prepare, train, export.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 1000, (num_rows, NUM_DENSE))
    ids = (num_ids * rng.random((num_rows, NUM_TABLES)) ** 3).astype(np.int64)
    missing = rng.random((num_rows, NUM_TABLES)) < 0.05
    labels = rng.random(num_rows) < 0.3
    rows: list[RawRow] = []
    for place in range(num_rows):
        row: RawRow = {
            name: str(value) for name, value in zip(DENSE, numbers[place].tolist(), strict=True)
        }
        for name, value, gone in zip(
            TABLES, ids[place].tolist(), missing[place].tolist(), strict=True
        ):
            row[name] = None if gone else f"{value * 2654435761 % (1 << 32):08x}"
        rows.append(row)
    lines = [",".join(["label", *rows[0]])]
    lines += [
        ",".join([str(int(label)), *(value or "" for value in row.values())])
        for label, row in zip(labels, rows, strict=True)
    ]
    text = folder / "rows.csv"
    text.write_text("\n".join(lines) + "\n")
    schema = Schema.from_toml(
        'label = "label"\n'
        + "".join(
            [f"[dense.{name}]\n" for name in DENSE] + [f"[categorical.{name}]\n" for name in TABLES]
        )
    )
    data = folder / "data"
    prepare(
        [TextSource(text, ",", True)],
        schema,
        data,
        PrepareOptions(SplitRule.parse("time:0.8/0.1/0.1")),
    )
    run = _train(folder, data, steps, checkpoint_every)
    checkpoints = sorted((run.path / "checkpoints").glob("step-*"))
    export_checkpoint(checkpoints[0], folder / "float32")
    export_checkpoint(checkpoints[0], folder / "int8", ExportOptions("int8"))
    predictor = pb.Predictor.open(folder / "float32")
    _write_vocabulary(predictor, rows, folder / "float32" / "vocabulary.json")
    return ServingCase(
        rows[:4096],
        folder / "float32",
        folder / "int8",
        predictor.score_raw(rows[:4096]).tolist(),
        checkpoints,
    )


def _train(folder: Path, data: Path, steps: int, checkpoint_every: int) -> RunDirectory:
    config = check_config(
        {
            "data": {"dir": str(data)},
            "model": {"name": "dlrm", "dim": DIM, "bottom": [64], "top": [128, 64]},
            "train": {
                "steps": steps,
                "batch_size": 512,
                "checkpoint_every": checkpoint_every,
                "full_checkpoint_every": 1 + steps // checkpoint_every,
                "keep": 1 + steps // checkpoint_every,
            },
        },
        "the benchmark",
    )
    run = RunDirectory(folder / "run")
    run.create(config)
    run_training(config, open_dataset(config.data), run, lambda total_steps: FanOut([]))
    return run


def _write_vocabulary(predictor: pb.Predictor, rows: list[RawRow], path: Path) -> None:
    """Write, for each feature, the row of its table by the value's text.

    Peers look values up in such a dictionary.
    """
    results: dict[str, dict[str, int]] = {}
    for place, name in enumerate(TABLES):
        values = sorted({row[name] or "" for row in rows})
        columns: dict[str, list[object]] = {
            column: [None] * len(values) for column in predictor.columns
        }
        columns[name] = list(values)
        ids = predictor.encode(columns).values.view(NUM_TABLES, -1)[place].tolist()
        results[name] = dict(zip(values, ids, strict=True))
    path.write_text(json.dumps({"numeric": DENSE, "rows": results}))
