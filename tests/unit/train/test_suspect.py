"""A loss that is none names the sample to look at, and a stream can leave it out, for good."""

import pytest
import torch

from pibroch.config.recipes import check_config
from pibroch.data import JaggedBatch
from pibroch.data.streams.journal import Journal
from pibroch.errors import NonFiniteLossError
from pibroch.observability.records import FanOut
from pibroch.train.data_source import open_dataset
from pibroch.train.run import run_training
from pibroch.train.run_directory import RunDirectory
from pibroch.train.suspect import suspect

SCHEMA = 'label = "c"\n[dense.n]\ntransform = "identity"\n[categorical.u]\nencoding = "raw"\n'


def batch_of(dense, labels):
    size = len(labels)
    ids = torch.zeros(1, size, dtype=torch.int64)
    return JaggedBatch.from_one_hot(torch.tensor(dense), ["u"], ids, torch.tensor(labels))


@pytest.mark.parametrize("tasks", [(), (2,)])
def test_the_sample_whose_logits_are_not_finite(tasks):
    logits = torch.zeros(4, *tasks)
    logits[2] = torch.nan
    batch = batch_of([[9.0]] * 4, [0.0] * 4)
    assert suspect(batch, logits) == (2, "one of 1 of 4 whose logits are not finite")


@pytest.mark.parametrize("logit", [torch.nan, 0.0])
def test_else_the_one_with_the_largest_number(logit):
    logits = torch.full((3,), logit)
    assert suspect(batch_of([[1.0], [-1e18], [3.0]], [0.0] * 3), logits)[0] == 1
    assert suspect(batch_of([[1.0], [2.0], [3.0]], [0.0, 1.0, 1e19]), logits)[0] == 2
    assert suspect(batch_of([[1.0], [torch.nan], [1e19]], [0.0] * 3), logits)[0] == 1


def test_pairs_are_not_looked_at():
    assert suspect(batch_of([[1.0], [2.0]], [0.0] * 2), torch.zeros(5, 3))[0] == 1


def trained(folder, **stream):
    """Train what there is, going on from the last checkpoint."""
    stream = {"path": str(folder / "events"), "schema_file": str(folder / "s.toml"), **stream}
    recipe = {
        "data": {"stream": stream},
        "model": {"name": "dcnv2", "dim": 4, "top": [8]},
        "embedding": {"rows": {"name": "hashed", "capacity": 64}},
        "train": {"batch_size": 32, "checkpoint_every": 5, "threads": 1},
    }
    config = check_config(recipe, "the test's recipe")
    run = RunDirectory(folder / "run")
    if not run.path.exists():
        run.create(config)
    return run_training(config, open_dataset(config.data), run, lambda _: FanOut([]))


def test_a_stream_goes_on_without_a_record_that_makes_the_loss_none(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA)
    (tmp_path / "events").mkdir()
    lines = [f"{i % 2},{i % 7},{i % 50}\n" for i in range(320)]
    lines[300:300] = ["bad\n", "1,1.5e19,7\n"]  # its square is finite, and no third power
    (tmp_path / "events" / "a.csv").write_text("".join(["c,n,u\n", *lines]))
    for _ in range(2):
        with pytest.raises(NonFiniteLossError, match=r"in step 10.*a\.csv:303, .*skip="):
            trained(tmp_path)
    trained(tmp_path, skip=["a.csv:303"])
    journal = Journal(tmp_path / "run" / "stream" / "journal")
    assert [step for step, _ in journal.steps_after(0)] == list(range(1, 12))
    assert journal.skipped == {"a.csv:303"}
    (aside,) = (tmp_path / "run" / "stream" / "bad").iterdir()
    assert [line.split('"line": ')[1][:3] for line in aside.read_text().splitlines()] == [
        "302",
        "303",
    ]
    assert trained(tmp_path).summary.steps == 11, "nothing has to be said again"
