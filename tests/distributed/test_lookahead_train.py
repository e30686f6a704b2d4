"""`pibroch train` with the lookahead exchange: the files of `alltoall`, killed and resumed too.

What it reports and traces.
"""

import json
import os
import signal

import numpy as np
import pytest
import training_cases as cases
from launched_team import Team

from pibroch.config import to_toml
from pibroch.data import EncodedDataset, Loader
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import files_below, make_config

PURPOSES = {"critical", "deferred", "evict", "ids", "other", "prefetch", "write back"}
COMMON = ["train.keep=99", "train.evaluate_every=5", "train.log_every=1"]
VARIANTS = {
    "default": (2, [], []),
    "averages of 3 ranks": (
        3,
        ["train.average=0.9", "train.clip_norm=0.5"],
        ["embedding.lookahead=3"],
    ),
    "a cache of little more than a batch": (
        2,
        ["embedding.placement=table_wise", "train.batch_size=20", "train.steps=42"],
        ["embedding.cache_rows=200"],
    ),
    "another model": (
        2,
        ["model.name=dcnv2", "embedding.optimizer={name='rowwise_adagrad', lr=0.1}"],
        ["embedding.cache=partitioned", "embedding.delayed_sync=false"],
    ),
}


def saved(folder):
    """All files of checkpoints, and which is the best.

    Manifests are without the recipe's embedding table, which names the exchange, and without the
    number of processors.
    """
    files = files_below(folder / "checkpoints")
    for name in [name for name in files if name.endswith("manifest.json")]:
        files[name] = json.loads(files[name])
        del files[name]["config"]["embedding"], files[name]["sha256"]
        del files[name]["config"]["data"]["processors"]
    return files, CheckpointFolder(folder / "checkpoints", 99).best().name


def check_same_files(folder, expected):
    (files, best) = saved(folder)
    (others, other_best) = saved(expected)
    assert sorted(files) == sorted(others)
    assert [name for name in files if files[name] != others[name]] == []
    assert best == other_best


def curve(folder):
    """What was measured, without times and traffic."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("kind", "step", "loss", "auc", "logloss", "is_best")
    return [[record.get(name) for name in names] for record in records]


def test_real_ranks_killed_and_resumed_end_with_the_files_of_alltoall(data, tmp_path):
    recipes = {}
    for exchange in ("alltoall", "lookahead"):
        more = (
            ["embedding.lookahead=5", "embedding.compress=true"] if exchange == "lookahead" else []
        )
        config = make_config(
            data, *COMMON, "train.epochs=4", f"embedding.exchange={exchange}", *more
        )
        recipes[exchange] = tmp_path / f"{exchange}.toml"
        recipes[exchange].write_text(to_toml(config.model_dump()))
    expected = tmp_path / "expected"
    folder = tmp_path / "killed"
    with Team(recipes["alltoall"], "--run-dir", expected, "--ranks", 2) as team:
        assert team.end() == 0, team.output
    with Team(recipes["lookahead"], "--run-dir", folder, "--ranks", 2) as team:
        team.wait_for_step(folder, 9)
        os.killpg(team.process.pid, signal.SIGKILL)
        team.end()
    saved_steps = CheckpointFolder(folder / "checkpoints", 99).steps()
    assert 7 in saved_steps and 84 not in saved_steps
    with Team("--run-dir", folder, "--resume", "--ranks", 2, "--trace") as team:
        assert team.end() == 0, team.output
    check_same_files(folder, expected)
    assert curve(folder) == curve(expected)
    check_summary(json.loads((folder / "summary.json").read_text()))
    for rank in range(2):
        events = json.loads((folder / "trace" / f"rank{rank}.json").read_text())["traceEvents"]
        check_trace(events, rank, 84 - saved_steps[-1])


def check_summary(summary):
    assert summary["exchange"] == "lookahead" and 0 < summary["cache_hit_rate"] < 1
    assert 4 < summary["lookahead"] <= 5
    assert (
        set(summary["bytes_by_purpose"]) == PURPOSES
        and min(summary["bytes_by_purpose"].values()) > 0
    )
    assert sum(summary["bytes_by_purpose"].values()) == summary["bytes_sent"]


def check_trace(events, rank, num_steps):
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        f"rank {rank}"
    ]
    threads = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans)
    names = {
        thread: {event["name"] for event in spans if threads[event["tid"]] == thread}
        for thread in threads.values()
    }
    loop = {
        "read batch",
        "forward",
        "backward",
        "dense optimizer",
        "evaluate",
        "checkpoint",
        "wait for rows",
    }
    assert names["MainThread"] >= loop
    assert names["pibroch-communication"] >= {"critical", "deliver", "settle", "announce"}
    assert names["pibroch-planner"] >= {"plan", "group", "prepare", "local"}
    forwards = [event for event in spans if event["name"] == "forward"]
    assert len(forwards) == num_steps - 10, "all but the first ten"
    waits = [event for event in spans if event["name"] == "wait for rows"]
    assert all(sum(_is_within(wait, forward) for forward in forwards) == 1 for wait in waits)


def _is_within(inner, outer):
    return (
        outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_files_as_alltoall(worlds, data, tmp_path, name):
    size, both, own = VARIANTS[name]
    results = {}
    for exchange, more in (("alltoall", []), ("lookahead", own)):
        config = make_config(data, *COMMON, *both, f"embedding.exchange={exchange}", *more)
        results[exchange] = worlds(size).run(
            cases.train, config.model_dump(), str(tmp_path / exchange)
        )
    check_same_files(tmp_path / "lookahead", tmp_path / "alltoall")
    assert curve(tmp_path / "lookahead") == curve(tmp_path / "alltoall")
    for actual, other in zip(results["lookahead"], results["alltoall"], strict=True):
        assert (actual["losses"], actual["evaluations"]) == (other["losses"], other["evaluations"])
        assert other["summary"].cache_hit_rate is other["summary"].bytes_by_purpose is None
        check_summary_of_world(actual["summary"], name)


def check_summary_of_world(summary, name):
    assert summary.exchange == "lookahead" and 0 < summary.cache_hit_rate < 1
    assert sum(summary.bytes_by_purpose.values()) > 0
    if name == "a cache of little more than a batch":
        assert 1 <= summary.lookahead < 10


@pytest.fixture(scope="module")
def with_increments(worlds, data):
    """``with_increments(folder, exchange, steps)`` trains so far.

    Two checkpoints of three are incremental.
    """

    def train(folder, exchange, steps):
        config = make_config(
            data,
            "train.keep=99",
            "train.full_checkpoint_every=3",
            "train.checkpoint_every=6",
            f"train.steps={steps}",
            "train.evaluate_every=1000",
            "train.log_every=1",
            f"embedding.exchange={exchange}",
        )
        worlds(2).run(cases.train, config.model_dump(), str(folder))

    return train


@pytest.fixture(scope="module")
def whole(with_increments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    with_increments(folder, "alltoall", 42)
    return folder


@pytest.mark.parametrize("first", ["lookahead", "alltoall"])
@pytest.mark.parametrize("second", ["lookahead", "alltoall"])
def test_incremental_checkpoints_resume_to_the_same_bits_with_any_exchange(
    with_increments, whole, tmp_path, first, second
):
    """Step 18 is saved with the second incremental checkpoint in a row, step 30 with a full one."""
    resumed = tmp_path / "resumed"
    with_increments(resumed, first, 18)
    with_increments(resumed, second, 42)
    steps = CheckpointFolder(resumed / "checkpoints", 99).steps()
    assert steps == [6, 12, 18, 24, 30, 36, 42]
    increments = [
        len(list((resumed / "checkpoints").glob(f"step-{step:08d}/tables/*@step-*")))
        for step in steps
    ]
    assert [number > 0 for number in increments] == [False, True, True, False, True, True, False]
    last = [files_below(folder / "checkpoints" / "step-00000042") for folder in (resumed, whole)]
    assert [
        name for name in last[1] if last[0][name] != last[1][name] and name != "manifest.json"
    ] == []


def test_the_hit_rate_is_that_of_the_samples(worlds, data, tmp_path):
    """A partitioned cache keeps nothing of other homes.

    Only rows of this rank's home need not be fetched.
    """
    rates = {}
    for cache in ("partitioned", "lrpp"):
        config = make_config(
            data, *COMMON, "embedding.exchange=lookahead", f"embedding.cache={cache}"
        )
        result = worlds(2).run(cases.train, config.model_dump(), str(tmp_path / cache))[0]
        rates[cache] = result["summary"].cache_hit_rate
    read = 0
    home = 0
    split = EncodedDataset.open(data).split("train")
    for rank in range(2):
        loader = Loader(
            split, config.train.batch_size, shuffle=True, seed=config.seed, part=(rank, 2)
        )
        for _ in range(config.train.epochs):
            for batch in loader:
                ids = batch.values.numpy()
                feature = np.repeat(
                    np.arange(len(batch.keys)), np.diff(batch.offsets.numpy()[:: batch.batch_size])
                )
                rows = np.unique(np.stack([feature, ids]), axis=1)[1]
                read = read + len(rows)
                home = home + int((rows % 2 == rank).sum())
    assert rates["partitioned"] == pytest.approx(home / read, abs=1e-9)
    assert rates["lrpp"] > rates["partitioned"]
    records = [
        json.loads(line)
        for line in (tmp_path / "partitioned" / "metrics.jsonl").read_text().splitlines()
    ]
    of_steps = [r["cache_hit_rate"] for r in records if r["kind"] == "training"]
    assert len(of_steps) == 42 and all(0 < rate < 1 for rate in of_steps)
    assert [r["lookahead"] for r in records if r["kind"] == "training"][-2:] == [1, 1]


def test_one_rank_hits_always(worlds, data, tmp_path):
    config = make_config(
        data, *COMMON, "train.steps=12", "embedding.exchange=lookahead", "embedding.cache_rows=0"
    )
    result = worlds(1).run(cases.train, config.model_dump(), str(tmp_path / "run"))[0]
    assert result["summary"].cache_hit_rate == 1 and result["summary"].exchange == "lookahead"
