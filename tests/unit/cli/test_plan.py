import re
import sys

import numpy as np
import pytest

from pibroch.cli.main import main
from pibroch.planner.profile import AccessProfile
from pibroch.planner.store import load_plan


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    from pibroch.data.synthetic import SyntheticOptions, synthesize

    path = tmp_path_factory.mktemp("data") / "set"
    synthesize(SyntheticOptions(3000, 0, 500), path)
    return path


@pytest.fixture
def pibroch(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["pibroch", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return run


def test_from_data_to_a_plan_and_its_page(dataset, tmp_path, pibroch):
    code, output, _ = pibroch("profile", dataset, "--out", tmp_path / "p", "--batch-size", 128)
    assert code == 0 and "26 tables" in output
    profile = AccessProfile.load(tmp_path / "p")
    assert profile.batch_size == 128 and profile.num_samples == 2100
    made = "--shards", 4, "--extra", 10, "--table-dim", "C3=4", "--out", tmp_path / "one"
    code, output, beside = pibroch("plan", "--profile", tmp_path / "p", "--data", dataset, *made)
    assert code == 0 and "balance of memory" in output and "Algorithm 1" in beside
    _, prediction = load_plan(tmp_path / "one")
    assert prediction.batch_size == 128 and prediction.extra == pytest.approx(0.1)
    (tmp_path / "t.toml").write_text("hosts = [2, 2]\nbetween_hosts = 4.21\n")
    made = "--topology", tmp_path / "t.toml", "--mode", "training", "--out", tmp_path / "two"
    code, *_ = pibroch("plan", "--data", dataset, *made)
    assert code == 0 and load_plan(tmp_path / "two")[1].policy == "safe"
    code, output, _ = pibroch("plan", "explain", tmp_path / "one", "--html", tmp_path / "one.html")
    assert (
        code == 0
        and "what extra memory buys" in output
        and (tmp_path / "one.html").stat().st_size > 20_000
    )
    code, output, _ = pibroch("plan", "diff", tmp_path / "one", tmp_path / "two")
    assert code == 0 and re.search(r"rows move, [\d,]+ are sent", output)


def test_a_sample_is_extrapolated(tmp_path, pibroch):
    ids = np.random.default_rng(0).zipf(1.5, 3000) % 1000
    (tmp_path / "trace.txt").write_text("".join(f"{i}\n" for i in ids))
    words = (
        "profile",
        tmp_path / "trace.txt",
        "--rows",
        5000,
        "--to-samples",
        60_000,
        "--out",
        tmp_path / "p",
    )
    assert pibroch(*words)[0] == 0
    profile = AccessProfile.load(tmp_path / "p")
    assert profile.num_rows == {"trace": 5000} and profile.num_accesses == pytest.approx(
        60_000, rel=0.05
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan"], "none of --profile, --data and --recipe"),
        (["plan", "--data", "DATA", "--out", "OUT"], "neither --topology nor --shards"),
        (
            ["plan", "--data", "DATA", "--shards", 2, "--out", "OUT", "--optimizer", "magic"],
            "--optimizer magic",
        ),
        (
            ["plan", "--data", "DATA", "--shards", 2, "--out", "OUT", "--table-dim", "x=3"],
            "--table-dim x=3",
        ),
        (
            ["plan", "--data", "DATA", "--shards", 2, "--out", "OUT", "--policy", "safe"],
            "policy 'safe' for inference",
        ),
        (["plan", "explain", "none"], "none, which is not there"),
        (["profile", "none", "--out", "OUT"], "none, which is not there"),
        (["profile", "DATA", "--out", "OUT", "--rows", 5], "--rows for a dataset"),
    ],
)
def test_wrong_usage_is_said(dataset, tmp_path, pibroch, words, message):
    words = [{"DATA": dataset, "OUT": tmp_path / "out"}.get(word, word) for word in words]
    code, _, output = pibroch(*words)
    assert code == 2 and message in output
    assert not (tmp_path / "out").exists()


def test_a_profile_of_other_data_is_refused(dataset, tmp_path, pibroch):
    from pibroch.data.synthetic import SyntheticOptions, synthesize

    synthesize(SyntheticOptions(1500, 9, 500), tmp_path / "other")
    assert pibroch("profile", tmp_path / "other", "--out", tmp_path / "p")[0] == 0
    code, _, output = pibroch(
        "plan",
        "--profile",
        tmp_path / "p",
        "--data",
        dataset,
        "--shards",
        2,
        "--out",
        tmp_path / "o",
    )
    assert code == 2 and "a profile of data" in output


def test_a_plan_is_watched_under_the_samples_that_come(dataset, tmp_path, pibroch):
    made = (
        "--data",
        dataset,
        "--shards",
        2,
        "--batch-size",
        50,
        "--threshold",
        5,
        "--out",
        tmp_path / "one",
    )
    assert pibroch("plan", *made)[0] == 0
    code, output, _ = pibroch("plan", "watch", tmp_path / "one", "--data", dataset, "--every", 20)
    assert (
        code == 0 and "batch 20: " in output and "batch 40: " in output and "a fresh plan" in output
    )
    code, _, error = pibroch(
        "plan", "watch", tmp_path / "one", "--data", dataset, "--split", "test", "--every", 900
    )
    assert code == 2 and "samples in split test" in error
