"""Bulk scoring by ranks that share the tables.

The bytes of one process, in order, and it goes on after a rank was killed.
"""

import os
import signal

import polars as pl
import predict_cases as cases
import pytest
from launched_team import Team, wait_until

from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.score.checkpoint import evaluate_checkpoint, open_for
from pibroch.score.split import ScoreParts, score_split
from small_run import make_config, run_command, train_here


@pytest.fixture(scope="module", params=["average=0.9", "bf16=true"])
def case(request, data, tmp_path_factory):
    """A run and its data: float32 averages over 26 ids a sample, or bfloat16 over bags."""
    folder = tmp_path_factory.mktemp("runs")
    if request.param == "bf16=true":
        data = folder / "bags"
        synthesize(SyntheticOptions(num_samples=1500, max_table_rows=40, multi_hot=True), data)
    config = make_config(
        data, "train.steps=12", f"train.{request.param}", "train.evaluate_batch_size=16"
    )
    return train_here(config, folder / "run")[0].path, data


def alone(run, data, out, split="test", advance=lambda _: None):
    """One process, through the installed function."""
    predictor, folder = open_for(run, EncodedDataset.open(data))
    return score_split(predictor, folder, EncodedDataset.open(data), split, out, advance)


@pytest.mark.parametrize(
    ("size", "bound", "name"), [(2, None, "scores.csv"), (3, 0, "scores.parquet")]
)
def test_many_ranks_write_the_bytes_of_one(worlds, case, tmp_path, size, bound, name):
    run, data = case
    expected = tmp_path / f"one-{name}"
    again = tmp_path / f"evaluated-{name}"
    alone(run, data, expected)
    evaluate_checkpoint(run, EncodedDataset.open(data), "test", again)
    for done, progress, rank in worlds(size).run(
        cases.score, str(run), str(data), "test", str(tmp_path / name), bound
    ):
        assert (done.num_samples, done.num_kept) == (EncodedDataset.open(data).samples["test"], 0)
        assert progress == (done.num_samples if rank == 0 else 0)
    read = pl.read_parquet if name.endswith("parquet") else pl.read_csv
    assert read(tmp_path / name).equals(read(expected)) and read(again).equals(read(expected))
    assert (tmp_path / name).read_bytes() == expected.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [name, expected.name, again.name]
    )


def test_ranks_go_on_with_what_one_process_left_and_the_other_way_round(worlds, case, tmp_path):
    run, data = case
    out = tmp_path / "scores.parquet"
    done = []

    def stop_later(count):
        done.append(count)
        if sum(done) > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alone(run, data, out, advance=stop_later)
    kept = len(list((tmp_path / "scores.parquet.parts").glob("*.parquet"))) * 16
    result = worlds(2).run(cases.score, str(run), str(data), "test", str(out), 2)
    assert [each.num_kept for each, *_ in result] == [kept] * 2 and kept > 0
    alone(run, data, tmp_path / "one.parquet")
    assert out.read_bytes() == (tmp_path / "one.parquet").read_bytes()


@pytest.mark.parametrize("case", ["average=0.9"], indirect=True)
def test_the_command_goes_on_after_a_rank_was_killed(case, tmp_path):
    run, data = case
    out = tmp_path / "scores.csv"
    arguments = ("--checkpoint", run, "--data", data, "--split", "train")
    parts = ScoreParts(out, EncodedDataset.open(data).samples["train"], 16)
    with Team(*arguments, "--out", out, "--ranks", 2, command="predict") as team:
        wait_until(
            lambda: (
                len(team.pids()) == 2
                and parts.folder.exists()
                and len(parts.missing()) < len(parts)
            )
        )
        os.kill(team.pids()[1], signal.SIGKILL)
        assert team.end() == 128 + signal.SIGKILL, team.output
    assert "rank 1 ended with signal SIGKILL" in team.output and "rank 1 failed" in team.output, (
        team.output
    )
    assert not out.exists()
    left = len(parts) - len(parts.missing())
    ended = run_command("predict", *arguments, "--out", out, "--ranks", 2)
    assert ended.returncode == 0, ended.stderr
    assert f"{left * parts.samples_per_part:,} of them from before" in ended.stdout, ended.stdout
    alone(run, data, tmp_path / "one.csv", "train")
    assert out.read_bytes() == (tmp_path / "one.csv").read_bytes()


@pytest.mark.parametrize("case", ["average=0.9"], indirect=True)
def test_what_cannot_be_done_is_said_once(case, tmp_path):
    run, data = case
    ended = run_command(
        "predict",
        "--checkpoint",
        run,
        "--data",
        data,
        "--out",
        tmp_path / "scores.txt",
        "--ranks",
        2,
    )
    assert ended.returncode == 2 and ended.stderr.count("got:") == 1, ended.stderr
    ended = run_command(
        "predict",
        "--checkpoint",
        tmp_path,
        "--data",
        data,
        "--out",
        tmp_path / "scores.csv",
        "--ranks",
        2,
    )
    assert ended.returncode == 2 and ended.stderr.count("got:") == 1, ended.stderr
