"""`pibroch search`: chosen on validation, resumed without repeating, the test split untouched."""

import fcntl
import json
import shutil
import signal
import time

import pytest

from pibroch.config import load_recipe, to_toml
from pibroch.data.storage import checksum
from pibroch.errors import ConfigError
from pibroch.train.run_directory import LOCK
from pibroch.train.search import Search, Trial, read_space
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


def running(folder):
    """Whether some run of the search is alive, and so holds its directory."""
    for path in (folder / "runs").glob(f"*/{LOCK}"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_search_that_is_stopped_goes_on_with_its_open_trials(recipe, tmp_path, number, code):
    out = tmp_path / "out"
    line = ["search", recipe, "--space", tmp_path / "space.toml", "--out", out, "--trials", 2]
    with start_command(*line, "--seeds", 2) as process:
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
    done = run_command(*line, "--seeds", 2)
    assert done.returncode == 0, done.stderr
    found = trials(out)
    assert len(found) == 2 and all(len(each["figures"]) == 2 for each in found)
    assert [each["settings"] for each in found[: len(begun)]] == [
        each["settings"] for each in begun
    ]


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
