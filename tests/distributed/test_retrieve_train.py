"""`pibroch train` with the exchange `retrieve`: the files of `alltoall`."""

import json

import numpy as np
import training_cases as cases
from test_lookahead_train import COMMON, check_same_files, curve

from pibroch.data import EncodedDataset
from pibroch.observability.report import write_report
from pibroch.planner.assignment import Assignment
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import TableSize
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.planner.store import save_plan
from pibroch.planner.topology import ClusterTopology
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import make_config


def test_the_same_files_as_alltoall_whoever_shares_memory(worlds, data, expected, tmp_path):
    for hosts in ("[0,0]", "[0,1]"):
        config = make_config(
            data, *COMMON, "embedding.exchange=retrieve", f"embedding.exchange.hosts={hosts}"
        )
        folder = tmp_path / hosts
        results = worlds(2).run(cases.train, config.model_dump(), str(folder))
        check_same_files(folder, expected)
        assert curve(folder) == curve(expected)
        assert results[0]["summary"].exchange == "retrieve"


def make_plan_file(data, path, num_ranks=3):
    """A plan for rows that are read in another way than these data read them.

    All of a table's hot rows lie together.
    """
    dataset = EncodedDataset.open(data)
    tables = [TableSize(name, rows, 4 * 8, 4 * 4) for name, rows in dataset.num_rows.items()]
    counts = {
        name: np.arange(rows, 0, -1).astype(np.int64) for name, rows in dataset.num_rows.items()
    }
    profile = AccessProfile(
        {
            name: TableCounts(each, np.minimum(each, 50).astype(np.int32))
            for name, each in counts.items()
        },
        2500,
        50,
        50,
        "x",
    )
    options = PlanOptions(extra=0.0, mode="training", steps=False)
    assignment, prediction = make_plan(tables, profile, ClusterTopology.uniform(num_ranks), options)
    lopsided = Assignment(
        assignment.partition_of, np.zeros_like(assignment.home), assignment.copies
    )  # all on one rank
    save_plan(path, lopsided, prediction)
    return path


def test_rows_that_follow_the_data_leave_the_numbers_of_those_that_stay(worlds, data, tmp_path):
    plan = make_plan_file(data, tmp_path / "plan.json")
    folders = {}
    above = "train.replan_above=1.1"
    for name, exchange, more in (
        ("stays", "alltoall", []),
        ("one", "alltoall", [above]),
        ("other", "retrieve", [above]),
    ):
        config = make_config(
            data,
            *COMMON,
            "train.epochs=2",
            "train.full_checkpoint_every=3",
            f"embedding.exchange={exchange}",
            f"embedding.exchange.plan={plan}",
            *more,
        )
        folders[name] = tmp_path / name
        worlds(3).run(cases.train_and_wait_for_plans, config.model_dump(), str(folders[name]))
    steps = CheckpointFolder(folders["stays"] / "checkpoints", 9).steps()
    for name in ("one", "other"):
        (look, *_) = json.loads((folders[name] / "plan_decay.json").read_text())
        assert look["moved_to"] is not None and look["current"] > 1.3 * look["fresh"]
        assert curve(folders[name]) == curve(folders["stays"])
        assert CheckpointFolder(folders[name] / "checkpoints", 9).steps() == steps
        assert "of a fresh one" in write_report(folders[name], tmp_path / "report.html").read_text()
    config = make_config(data, *COMMON, "train.epochs=3", "embedding.exchange=alltoall")
    results = [
        worlds(2).run(cases.train, config.model_dump(), str(folder)) for folder in folders.values()
    ]
    assert results[0][0]["losses"] == results[1][0]["losses"] == results[2][0]["losses"]
