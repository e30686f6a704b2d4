"""Where nothing can be written, every command says so: exit code 2, and no bug."""

import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from pibroch.cli import main
from small_run import make_config, run_command, run_installed, train_here

OUTPUTS = {"aot", "out", "html", "page", "onnx", "predictions", "run_dir", "traces"}
"""Names of parameters that say where something is written."""
RUN = "<run>"
DATA = "<data>"
COMMANDS = {
    "data prepare/out": ["data", "prepare", "csv", "<csv>", "--schema", "<schema>", "--out"],
    "data synthesize/out": ["data", "synthesize", "--samples", 200, "--max-table-rows", 9, "--out"],
    "train/run_dir": ["train", "synthetic_small", "--data", DATA, "--run-dir"],
    "predict/out": ["predict", "--checkpoint", RUN, "--data", DATA, "--out"],
    "evaluate/predictions": ["evaluate", "--checkpoint", RUN, "--data", DATA, "--predictions"],
    "search/out": ["search", "synthetic_small", "--space", "<space>", "--out"],
    "report/out": ["report", RUN, "--out"],
    "compare/out": ["compare", RUN, "<other run>", "--out"],
    "profile/out": ["profile", DATA, "--out"],
    "plan/out": ["plan", "--data", DATA, "--shards", 2, "--out"],
    "plan/html": ["plan", "--data", DATA, "--shards", 2, "--out", "<plan>", "--html"],
    "plan explain/html": ["plan", "explain", "<plan>", "--html"],
    "plan towers/out": [
        "plan",
        "towers",
        "--checkpoint",
        RUN,
        "--data",
        DATA,
        "--towers",
        2,
        "--out",
    ],
    "plan towers/page": [
        "plan",
        "towers",
        "--checkpoint",
        RUN,
        "--data",
        DATA,
        "--towers",
        2,
        "--out",
        "<groups>",
        "--page",
    ],
    "plan topology/out": ["plan", "topology", "--out"],
    "export/out": ["export", RUN, "--out"],
    "export/onnx": ["export", RUN, "--onnx"],
    "export/aot": ["export", RUN, "--aot"],
    "checkpoint convert/out": ["checkpoint", "convert", RUN, "--to", "dlrm"],
    "stream generate/out": [
        "stream",
        "generate",
        "--seconds",
        1,
        "--fast",
        "--truth",
        "/proc/none.csv",
        "--out",
    ],
    "simulate recipe/page": ["simulate", "synthetic_small", "--data", DATA, "--page"],
    "simulate recipe/traces": ["simulate", "synthetic_small", "--data", DATA, "--traces"],
    "simulate calibrate/out": ["simulate", "calibrate", "--output"],
    "bench/out": ["bench", "kernels", "--quick", "--out"],
}


@pytest.fixture(scope="module")
def places(data, tmp_path_factory):
    """What the commands read, by its stand-in."""
    folder = tmp_path_factory.mktemp("read")
    (folder / "a.csv").write_text("y,c\n" + "".join(f"{i % 2},v{i % 5}\n" for i in range(60)))
    (folder / "s.toml").write_text('label = "y"\n[categorical.c]\n')
    run, _ = train_here(
        make_config(data, "train.steps=2", "model.batch_norm=false"), folder / "run"
    )
    result = {"<csv>": folder / "a.csv", "<schema>": folder / "s.toml", RUN: run.path, DATA: data}
    result["<other run>"] = shutil.copytree(run.path, folder / "other", symlinks=True)
    result |= {"<plan>": folder / "plan", "<groups>": folder / "groups.json"}
    result["<space>"] = folder / "space.toml"
    result["<space>"].write_text("optimizer.lr = [1e-3, 1e-2]\n")
    made = run_command("plan", "--data", data, "--shards", 2, "--out", result["<plan>"])
    assert made.returncode == 0, made.stderr
    return result


def arguments(name, places, out):
    return [places.get(word, word) for word in COMMANDS[name]] + [out]


def refused(ended, *parts):
    assert ended.returncode == 2 and "bug" not in ended.stderr, ended.stderr
    lines = ended.stderr[ended.stderr.index("got:") :].splitlines()
    assert [line.split(":")[0] for line in lines][:2] == ["got", "need"], lines
    assert all(part in lines[0] for part in parts), lines


def test_no_output_is_left_out():
    groups = {name: import_module(f"pibroch.cli.{name}").app for name in main._GROUPS}
    results = set()

    def look(app, *names):
        calls = [
            (command.name or command.callback.__name__, command.callback)
            for command in app.registered_commands
        ]
        calls += [("", app.registered_callback.callback)] if app.registered_callback else []
        for name, call in calls:
            results.update(
                f"{' '.join([*names, name]).strip()}/{option}"
                for option in OUTPUTS & {*call.__annotations__}
            )

    look(main.app)
    for name, app in groups.items():
        look(app, name)
    only_named = {"report/run_dir", "job manifest/run_dir"}
    assert results - only_named == set(COMMANDS), "those are read, or printed"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_where_nothing_may_be_written(name, places):
    out = Path("/proc/none.csv")  # root, too, may not
    refused(run_command(*arguments(name, places, out)), "none.csv")


@pytest.mark.parametrize("name", ["train/run_dir", "predict/out", "evaluate/predictions"])
def test_a_folder_that_is_a_file(name, places, tmp_path):
    (tmp_path / "file").write_text("")
    refused(run_command(*arguments(name, places, tmp_path / "file" / "out.csv")), str(tmp_path))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("name", ["train/run_dir", "predict/out", "evaluate/predictions"])
def test_a_full_disk(name, kind, places, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "none", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        free = os.statvfs(tmp_path)
        (tmp_path / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize))
        refused(run_command(*arguments(name, places, tmp_path / f"out.{kind}")), "No space left")
        assert not list(tmp_path.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_made(places, tmp_path):
    out = os.fsdecode(bytes(tmp_path) + b"/caf\xe9.csv")
    for name in ("train/run_dir", "predict/out"):
        refused(run_command(*arguments(name, places, out)), r"caf\xe9.csv, which is not UTF-8")
    assert not list(tmp_path.iterdir())
    Path(out).mkdir()
    refused(run_command("report", places[RUN], cwd=out), r"caf\xe9.csv, which is not UTF-8")


def test_what_a_terminal_cannot_show_is_no_bug(places, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    counted = run_installed("profile", places[DATA], "--out", tmp_path / "Größe")
    assert counted.returncode == 0 and r"Gr\xf6\xdfe" in counted.stdout, counted.stderr
