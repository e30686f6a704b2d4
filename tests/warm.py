"""Loaded by the server that processes are forked from.

A training step, so that they need not load kernels one by one.
"""

import gc
import tempfile
from contextlib import suppress
from pathlib import Path

import torch


def train_a_step() -> None:
    from pibroch.config.recipes import check_config
    from pibroch.data.synthetic import SyntheticOptions, synthesize
    from pibroch.observability.records import FanOut
    from pibroch.train.data_source import open_dataset
    from pibroch.train.run import run_training
    from pibroch.train.run_directory import RunDirectory

    model = {
        "name": "dlrm",
        "dim": 4,
        "bottom": [8],
        "top": [16],
        "dropout": 0.2,
        "batch_norm": True,
    }
    train = {"steps": 2, "batch_size": 20, "threads": 1}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        synthesize(SyntheticOptions(num_samples=100, max_table_rows=10), folder / "data")
        for exchange in ("local", "lookahead"):
            embedding = {"exchange": exchange, "optimizer": {"name": "adam", "lr": 0.01}}
            config = check_config(
                {
                    "data": {"dir": str(folder / "data")},
                    "model": model,
                    "train": train,
                    "embedding": embedding,
                },
                "warm",
            )
            run = RunDirectory(folder / exchange)
            run.create(config)
            run_training(config, open_dataset(config.data), run, lambda total_steps: FanOut([]))


torch.set_num_threads(1)
with suppress(Exception):  # whatever is wrong is for the tests to say
    train_a_step()
# forked processes need not walk through a million objects of the libraries, nor copy their pages
gc.freeze()
