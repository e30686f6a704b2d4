"""`pibroch search`: chosen on validation, resumed without repeating, the test split untouched."""

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from pibroch.config import load_recipe, to_toml
from pibroch.data.storage import checksum
from pibroch.errors import ConfigError
from pibroch.train.run_directory import LOCK
from pibroch.train.search import Search, Trial, _failed, read_space
from small_run import make_config, run_command, start_command

SPACE = "optimizer.lr = {low = 1e-5, high = 1e-1, log = true}\nmodel.top = [[8], [16, 8]]\n"


@pytest.fixture
def recipe(data, tmp_path):
    """Of data whose test split lies nowhere: a run that opened it would fail."""
    without = shutil.copytree(data, tmp_path / "data")
    files = list((without / "test").iterdir())
    assert files
    for file in files:
        size = file.stat().st_size
        file.write_bytes(b"\xff" * size)
    path = tmp_path / "small.toml"
    config = make_config(without).model_dump()
    config["train"] |= {"epochs": 1}
    path.write_text(to_toml(config))
    (tmp_path / "space.toml").write_text(SPACE)
    return path


def trials(folder):
    files = sorted((folder / "trials").glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


def test_the_best_on_validation_becomes_a_recipe(recipe, tmp_path):
    out = tmp_path / "out"
    line = ["search", recipe, "--space", tmp_path / "space.toml", "--out", out, "--parallel", 2]
    done = run_command(*line, "--trials", 4)
    assert done.returncode == 0, done.stderr
    found = trials(out)
    assert len(found) == 4 and all(len(each["figures"]) == 1 for each in found)
    best = max(found, key=lambda each: each["figures"])
    config = load_recipe(str(out / "best.toml"))
    assert config.optimizer.lr == best["settings"]["optimizer.lr"]
    assert list(config.model.top) == best["settings"]["model.top"]
    assert config.train.evaluate_test
    assert done.stdout.startswith(f"trial {best['number']}  auc {best['figures'][0]:.5f}")
    page = (out / "search.html").read_text()
    assert page.count("<svg") == 2 and "the test split was not read" in page
    for each in found:
        run = out / "runs" / f"{each['number']:04}-seed-{config.seed}"
        records = map(json.loads, (run / "metrics.jsonl").open())
        evaluations = [one for one in records if one["kind"] == "evaluation"]
        assert {one["split"] for one in evaluations} == {"validation"}
        kept = [one for one in evaluations if one["is_best"]]
        assert kept[-1]["auc"] == each["figures"][0]
        assert "auc" not in json.loads((run / "evaluation.json").read_text())

    written = {file: file.stat().st_mtime_ns for file in (out / "trials").iterdir()}
    more = run_command(*line, "--trials", 5)
    assert more.returncode == 0 and "4 trials are done" in more.stderr
    assert len(trials(out)) == 5
    assert all(file.stat().st_mtime_ns == at for file, at in written.items())
    other = run_command(*line, "--trials", 5, "--seeds", 2)
    assert other.returncode == 2 and "another seeds" in other.stderr


def test_it_goes_on_with_the_same_settings_and_data_alone(recipe, data, tmp_path):
    """Not with a recipe of the same name that says something else."""
    space = read_space(tmp_path / "space.toml")
    out = tmp_path / "out"

    def search(path=recipe, overrides=()):
        return Search(str(path), overrides, space, 1, out)

    first = search()
    settings = {"optimizer.lr": 0.01, "model.top": [8]}
    first._keep(Trial(1, settings, figures=(0.75,)))
    first.run(1, print)
    again = search(shutil.copy(recipe, tmp_path / "renamed.toml"))
    assert again.trials[1].value == 0.75
    again.run(1, print)
    text = recipe.read_text()
    recipe.write_text(text.replace('monitor = "auc"', 'monitor = "logloss"'))
    with pytest.raises(ConfigError, match=r"another `train\.monitor` in its settings"):
        search()
    with pytest.raises(ConfigError, match="another `seed` in its settings"):
        search(tmp_path / "renamed.toml", ("seed=9",))
    recipe.write_text(text)
    folder = tmp_path / "data"
    shutil.rmtree(folder)
    shutil.copytree(data, folder)  # whose test split is another one
    labels = folder / "train" / "labels.u8"
    labels.write_bytes(labels.read_bytes()[::-1])
    manifest = json.loads((folder / "dataset.json").read_text())
    manifest["files"]["train/labels.u8"][1] = checksum(labels)
    (folder / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="another data than the search"):
        search().run(1, print)


@pytest.mark.parametrize(
    ("monitor", "order"), [("auc", [2, 3, 1, 4]), ("logloss", [1, 4, 3, 2]), ("click:auc", None)]
)
def test_the_best_trial_has_the_most_auc_or_the_least_loss(recipe, tmp_path, monitor, order):
    """Of two alike the earlier one; those that failed or have no result are none."""
    space = read_space(tmp_path / "space.toml")
    search = Search(str(recipe), (f"train.monitor='{monitor}'",), space, 2, tmp_path / "out")
    figures = {1: (0.5, 0.3), 2: (0.7, 0.9), 3: (0.5, 0.5), 4: (0.4, 0.4), 5: (), 6: ()}
    for number, each in figures.items():
        search.trials[number] = Trial(number, {}, each, problem="it failed" if number == 6 else "")
    assert [trial.number for trial in search.done] == (order or [2, 3, 1, 4])
    assert search.num_over == 5


def running(folder):
    """Whether some run of the search is alive, and so holds its directory."""
    for path in (folder / "runs").glob(f"*/{LOCK}"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


@pytest.mark.parametrize(
    ("number", "code", "seeds"), [(signal.SIGINT, 130, 1), (signal.SIGKILL, -9, 2)]
)
def test_a_search_that_is_stopped_goes_on_with_its_open_trials(
    recipe, tmp_path, number, code, seeds
):
    out = tmp_path / "out"
    line = ["search", recipe, "--space", tmp_path / "space.toml", "--out", out, "--trials", 2]
    with start_command(*line, "--seeds", seeds) as process:
        deadline = time.monotonic() + 120
        while not list((out / "runs").glob("*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(out)
        process.send_signal(number)
        assert process.end().returncode == code
    begun = trials(out)
    assert begun and not begun[-1]["figures"]
    deadline = time.monotonic() + 10
    while running(out):
        assert time.monotonic() < deadline, "a run that goes on without its search"
        time.sleep(0.1)
    done = run_command(*line, "--seeds", seeds)
    assert done.returncode == 0, done.stderr
    found = trials(out)
    assert len(found) == 2 and all(len(each["figures"]) == seeds for each in found)
    assert [each["settings"] for each in found[: len(begun)]] == [
        each["settings"] for each in begun
    ]


def test_a_trial_that_was_killed_is_tried_again_and_one_that_failed_is_not(recipe, tmp_path):
    """By whoever goes on with the search; its run goes on, too."""
    out = tmp_path / "out"
    (tmp_path / "space.toml").write_text("embedding.optimizer.lr = [0.01]\n")
    line = ["search", recipe, "--space", tmp_path / "space.toml", "--out", out, "--trials", 1]
    with start_command(*line) as process:
        deadline = time.monotonic() + 120
        while not (words := "".join(map(Path.read_text, (out / "runs").glob(f"*/{LOCK}")))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(int(words.split()[1]), signal.SIGKILL)
        assert process.end().returncode == 1
    (killed,) = trials(out)
    assert killed["was_killed"] and killed["problem"].startswith("killed by signal 9")
    failed = {"number": 2, "settings": {"embedding.optimizer.lr": 0.01}, "problem": "exit code 2"}
    (out / "trials" / "0002.json").write_text(json.dumps(failed | {"figures": [], "seconds": 1.0}))
    done = run_command(*line[:-1], 2)
    assert done.returncode == 0, done.stderr
    first, second = trials(out)
    assert len(first["figures"]) == 1 and not first["was_killed"] and not first["problem"]
    assert second["problem"] == "exit code 2" and not list((out / "runs").glob("0002*"))


@pytest.mark.parametrize(
    ("code", "was_killed"), [(-9, True), (137, True), (-15, True), (1, False), (2, False)]
)
def test_a_signal_is_no_failure_of_the_settings(tmp_path, code, was_killed):
    """Of a run of several ranks the launcher says 128 and the signal."""
    (tmp_path / "run.log").write_text("a\nb\nthe last line\n")
    trial = _failed(Trial(1, {}), code, tmp_path / "run.log")
    assert trial.was_killed == was_killed and "the last line (run.log)" in trial.problem


@pytest.mark.parametrize(
    ("space", "got"),
    [
        ("", "empty"),
        ("optimizer.lr = 0.1", "optimizer.lr"),
        ("optimizer.lr = []", "optimizer.lr"),
        ("optimizer.lr = {low = 1, high = 0.1}", "optimizer.lr"),
        ("optimizer.lr = {low = 0.0, high = 0.1, log = true}", "optimizer.lr"),
        ("optimizer.lr = {low = 0.1, high = 0.2, steps = 3}", "optimizer.lr"),
        ('optimizer.lr = {low = "a", high = 0.2}', "numbers"),
        ("optimizer.rate = [0.1]", "rate"),
        ("model.dim = {low = 0, high = 8}", "model.dim"),
        ("seed = [1, 2]", "--seeds"),
        ("train.evaluate_test = [true]", "test split"),
        ("this is no TOML", "TOML"),
    ],
)
def test_a_space_that_makes_no_sense(tmp_path, space, got):
    path = tmp_path / "space.toml"
    path.write_text(space)
    with pytest.raises(ConfigError, match="(?s)" + got):
        Search("synthetic_small", (), read_space(path), 1, tmp_path / "out")


def test_trials_that_fail_are_said_and_end_a_search_of_nothing_else(recipe, tmp_path):
    (tmp_path / "space.toml").write_text("embedding.optimizer.lr = [1e30, 1e31]\n")
    out = tmp_path / "out"
    done = run_command(
        "search", recipe, "--space", tmp_path / "space.toml", "--out", out, "--trials", 9
    )
    assert done.returncode == 1 and "5 trials that failed" in done.stderr
    assert all(each["problem"] for each in trials(out))


@pytest.mark.parametrize(
    ("split", "num_mixed", "reason"),
    [("none", 300, "no validation samples"), ("time:0.6/0.2/0.2", 60, "that are all 0")],
)
def test_data_that_choose_nothing_are_refused_before_a_trial(tmp_path, split, num_mixed, reason):
    lines = [f"{int(k % 3 == 0 and k < num_mixed)},town{k % 9}" for k in range(300)]
    (tmp_path / "clicks.csv").write_text("click,city\n" + "\n".join(lines))
    (tmp_path / "schema.toml").write_text('label = "click"\n[categorical.city]\nmin_count = 1\n')
    made = run_command(
        "data", "prepare", "csv", tmp_path / "clicks.csv", "--schema", tmp_path / "schema.toml",
        "--split", split, "--out", tmp_path / "data",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (tmp_path / "small.toml").write_text(to_toml(make_config(tmp_path / "data").model_dump()))
    (tmp_path / "space.toml").write_text(SPACE)
    space = ("--space", tmp_path / "space.toml", "--out", tmp_path / "out")
    done = run_command("search", tmp_path / "small.toml", *space)
    assert done.returncode == 2
    assert reason in done.stderr
    assert not trials(tmp_path / "out")
