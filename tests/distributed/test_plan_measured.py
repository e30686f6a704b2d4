"""A plan's prediction beside the bytes that a run sent: `pibroch plan explain --run`."""

import json

import numpy as np
import pytest
from launched_team import Team

from pibroch.cli.main import main
from pibroch.config import to_toml
from pibroch.planner.store import load_plan
from small_run import make_config


@pytest.fixture
def pibroch(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["pibroch", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_what_a_run_sent_stands_beside_what_was_predicted(data, tmp_path, pibroch):
    config = make_config(data, "train.epochs=4", f"embedding.plan='{tmp_path / 'plan'}'")
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(config.model_dump()))
    made = (
        "--data",
        data,
        "--recipe",
        recipe,
        "--shards",
        2,
        "--mode",
        "training",
        "--batch-size",
        50,
    )
    assert pibroch("plan", *made, "--out", tmp_path / "plan")[0] == 0
    with Team(recipe, "--run-dir", run, "--ranks", 2) as team:
        assert team.end() == 0, team.output
    summary = json.loads((run / "summary.json").read_text())
    counted = np.array(summary["bytes_by_link"])
    predicted = np.array(load_plan(tmp_path / "plan")[1].payload_bytes)
    assert (np.diag(counted) == 0).all() and counted.sum() * summary["steps"] < summary[
        "bytes_sent"
    ] / 1.2
    np.testing.assert_allclose(
        counted, predicted, rtol=0.04
    )  # few steps, and each learns whether others go on

    code, output, notes = pibroch(
        "plan", "explain", tmp_path / "plan", "--run", run, "--html", tmp_path / "page.html"
    )
    assert code == 0 and "note:" not in notes
    shares = [
        float(line.split()[-1])
        for line in output.splitlines()
        if line.startswith(("all links", "rank "))
    ]
    assert len(shares) == 5 and shares == pytest.approx([1.0] * 5, abs=0.04)
    assert "Measured payload" in (tmp_path / "page.html").read_text()

    other = "--data", data, "--shards", 2, "--mode", "training", "--out", tmp_path / "other"
    assert pibroch("plan", *other)[0] == 0
    _, _, notes = pibroch("plan", "explain", tmp_path / "other", "--run", run)
    assert (
        f"placed by {tmp_path / 'plan'}" in notes
        and "batches of 50 samples a rank; the plan was made for 1024" in notes
    )
    three = "--data", data, "--shards", 3, "--mode", "training", "--out", tmp_path / "three"
    assert pibroch("plan", *three)[0] == 0
    code, _, notes = pibroch("plan", "explain", tmp_path / "three", "--run", run)
    assert code != 0 and "a run of 3 ranks" in notes
    assert pibroch("plan", "explain", tmp_path / "other", "--run", tmp_path)[0] != 0


def test_what_assigning_samples_spared_is_said(data, tmp_path, pibroch):
    """Under a plan by rows, in the explanation and on the run's page."""
    made = "--data", data, "--shards", 2, "--mode", "training", "--out", tmp_path / "plan"
    assert pibroch("plan", *made)[0] == 0
    placed = f"embedding.exchange.plan='{tmp_path / 'plan'}'"
    own = ["embedding.exchange=alltoall", "embedding.exchange.assign=rows", placed]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(make_config(data, "train.epochs=2", *own).model_dump()))
    run = tmp_path / "run"
    with Team(recipe, "--run-dir", run, "--ranks", 2) as team:
        assert team.end() == 0, team.output
    share = json.loads((run / "summary.json").read_text())["transfers_spared"]
    assert 0 < share < 1
    _, _, notes = pibroch("plan", "explain", tmp_path / "plan", "--run", run)
    assert f"assigned by their rows, which spared {share:.1%} of the transfers" in notes
    assert pibroch("report", run, "--out", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "transfers spared" in page and f"{share:.1%}" in page


@pytest.mark.parametrize("num_ranks, replicas", [(2, "gather"), (4, "sparse")])
def test_what_is_predicted_follows_the_batches_and_the_sums_of_the_run(
    data, tmp_path, pibroch, num_ranks, replicas
):
    """The plan is made from a profile of other batches, for others again; the run has its own."""
    config = make_config(
        data,
        "train.epochs=4",
        "embedding.exchange.name=alltoall",
        f"embedding.exchange.plan='{tmp_path / 'plan'}'",
        f"embedding.exchange.replicas={replicas}",
    )
    recipe = tmp_path / "recipe.toml"
    run = tmp_path / "run"
    recipe.write_text(to_toml(config.model_dump()))
    counted = data, "--batch-size", 200, "--out", tmp_path / "profile"
    assert pibroch("profile", *counted)[0] == 0
    made = ("--profile", tmp_path / "profile", "--recipe", recipe, "--shards", num_ranks)
    training = ("--mode", "training", "--policy", "everywhere", "--extra", 60, "--batch-size", 80)
    assert pibroch("plan", *made, *training, "--out", tmp_path / "plan")[0] == 0
    assert load_plan(tmp_path / "plan")[1].copied_rows > 0
    with Team(recipe, "--run-dir", run, "--ranks", num_ranks) as team:
        assert team.end() == 0, team.output
    code, output, notes = pibroch("plan", "explain", tmp_path / "plan", "--run", run)
    assert code == 0, notes
    assert f"batches of {config.train.batch_size / num_ranks:g} samples a rank" in notes
    shares = [
        float(line.split()[-1])
        for line in output.splitlines()
        if line.startswith(("all links", "rank "))
    ]
    assert len(shares) == 1 + 2 * num_ranks
    assert shares == pytest.approx([1.0] * len(shares), abs=0.06)
