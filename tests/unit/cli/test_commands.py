import json
import shutil
import signal
import time

import pytest

from pibroch.config import to_toml
from small_run import make_config, run_command, run_installed, start_command


@pytest.fixture
def recipe(data, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(to_toml(make_config(data).model_dump()))
    return path


def test_train_evaluate_report(recipe, data, tmp_path):
    run = tmp_path / "run"
    trained = run_installed(
        "train", recipe, "--run-dir", run, "--tensorboard", "--set", "train.epochs=1"
    )
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert trained.stdout.startswith(
        f"test AUC {summary['auc']:.4f}  logloss {summary['logloss']:.4f}  NE "
    )
    assert "best possible AUC 0." in trained.stdout and "validation: AUC" in trained.stderr
    assert list((run / "tensorboard").iterdir())
    evaluated = run_command("evaluate", "--checkpoint", run, "--data", data)
    assert evaluated.stdout.startswith(f"test AUC {summary['auc']:.4f}"), evaluated.stderr
    reported = run_command("report", run)
    assert (
        reported.stdout == f"wrote {run / 'report.html'}\n"
        and (run / "report.html").stat().st_size > 20_000
    )
    other = shutil.copytree(run, tmp_path / "other" / "run", symlinks=True)
    compared = run_command("compare", run, other, "--out", tmp_path / "both.html")
    assert compared.stdout.endswith(f"\nwrote {tmp_path / 'both.html'}\n"), compared.stderr
    page = (tmp_path / "both.html").read_text()
    assert f"<th>{run}</th><th>{other}</th>" in page and "All runs have the same data" in page
    for line, got in (([run], "runs"), ([run, run], "runs"), ([run, tmp_path], "holds no run")):
        refused = run_command("compare", *line, "--out", tmp_path / "none.html")
        assert refused.returncode == 2 and got in refused.stderr
    inside = run_command("compare", run, other, "--out", run / "config.toml")
    assert inside.returncode == 2 and "lies in" in inside.stderr
    again = run_command("train", recipe, "--run-dir", run)
    assert again.returncode == 2 and "--resume" in again.stderr
    other = run_command("train", recipe, "--run-dir", run, "--resume")
    assert (
        other.returncode == 2
        and "small.toml with `train.epochs = 2`\nneed: `train.epochs = 1`" in other.stderr
    )


def test_an_interrupted_run_ends_cleanly_and_goes_on(recipe, tmp_path):
    run = tmp_path / "run"
    with start_command("train", recipe, "--run-dir", run, "--set", "train.epochs=200") as process:
        deadline = time.monotonic() + 100
        while not (run / "checkpoints" / "step-00000007").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        ended = process.end()
    assert (
        ended.returncode == 130 and "--resume" in ended.stderr and "Traceback" not in ended.stderr
    )


def test_roles_are_shown_and_nothing_is_run(tmp_path):
    lookahead = ("--set", "embedding.exchange=lookahead", "--set", "embedding.servers=3")
    shown = run_command("train", "--roles", "--ranks", 2, *lookahead, "--run-dir", tmp_path / "run")
    assert shown.returncode == 0, shown.stderr
    cells = [line.split() for line in shown.stdout.splitlines()]
    assert ["trainer", "2", "this", "command"] in [line[:4] for line in cells]
    assert ["embedding", "server", "3", "this", "command"] in [line[:5] for line in cells]
    assert "oracle" in shown.stdout and not (tmp_path / "run").exists()
    processors = run_command("train", "--roles", "--set", "data.processors=2")
    assert ["data", "processor", "2", "this", "command"] in [
        line.split()[:5] for line in processors.stdout.splitlines()
    ]
    by_role = {"RANK": "0", "WORLD_SIZE": "6"}
    shared = run_command(
        "train", "--roles", "--by-role", *lookahead, "--set", "data.processors=1", env=by_role
    )
    cells = [line.split() for line in shared.stdout.splitlines()]
    assert ["trainer", "2", "the", "launcher:", "ranks", "0-1"] in [line[:6] for line in cells]
    assert ["embedding", "server", "3", "the", "launcher:", "ranks", "2-4"] in [
        line[:7] for line in cells
    ]
    assert ["data", "processor", "1", "the", "launcher:", "rank", "5"] in [
        line[:7] for line in cells
    ]
    assert (
        run_command("train", "--roles", *lookahead, env={"RANK": "1", "WORLD_SIZE": "6"}).stdout
        == ""
    )
    central = run_command(
        "train", "--roles", "--ranks", 2, *lookahead, "--set", "embedding.oracle=central"
    )
    assert ["oracle", "1", "this", "command"] in [
        line.split()[:4] for line in central.stdout.splitlines()
    ]
    alone = run_command("train", "--roles")
    assert "oracle" not in alone.stdout and "keeps all rows" in " ".join(alone.stdout.split())


def test_doctor_checks_the_kernels():
    ended = run_command("doctor")
    assert ended.returncode == 0, ended.stderr
    for part in ("torch", "SIMD", "memory", "TensorBoard", "kernels agree with their definitions"):
        assert part in ended.stdout


def test_doctor_compiles_what_runs_need_beforehand():
    ended = run_command("doctor", "--compile")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for run in ("one process", "alltoall, two ranks", "lookahead, two ranks"):
        assert f"compiled for {run}, " in ended.stdout


def test_help_names_every_command():
    ended = run_installed("--help")
    assert ended.returncode == 0
    for name in (
        "recipes",
        "train",
        "evaluate",
        "embedding-server",
        "oracle",
        "data-processor",
        "report",
        "compare",
        "doctor",
        "data",
        "bench",
    ):
        assert f" {name} " in ended.stdout


@pytest.mark.parametrize("line", [["train"], ["data", "prepare"], []])
def test_help_shows_flags_as_they_are_typed(line):
    shown = run_command(*line, "--help").stdout
    assert "--help" in shown and "<bool>" not in shown and "BOOLEAN" not in shown


@pytest.mark.parametrize(
    ("line", "place", "completions"),
    [("pibroch plan w", 2, ["watch"]), ("pibroch train --ra", 2, ["--ranks"])],
)
def test_shells_complete_commands_and_options(line, place, completions, monkeypatch):
    monkeypatch.setenv("_PIBROCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(place))
    assert run_installed().stdout.split() == completions
