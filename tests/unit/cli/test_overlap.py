"""No command writes over what it reads: same place, around it, or in it."""

import shutil
import sys

import pytest

import pibroch as pb
from pibroch.cli.main import main
from pibroch.data import EncodedDataset
from pibroch.overlap import refuse_overlap
from pibroch.serve.delta import export_delta
from pibroch.serve.export import ExportOptions, export_checkpoint
from raw_clicks import raw_rows, write_csv
from small_run import files_below, make_config, train_here

REPLACE = ExportOptions(overwrite=True)


@pytest.fixture(scope="module")
def steps(data, tmp_path_factory):
    config = make_config(data, "train.checkpoint_every=5", "train.steps=15", "train.keep=9")
    run, _ = train_here(config, tmp_path_factory.mktemp("overlap") / "run")
    return [run.path / "checkpoints" / f"step-{step:08d}" for step in (5, 10, 15)]


@pytest.fixture
def pibroch(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["pibroch", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err.replace("\n", " ")

    return run


def test_same_around_and_within(tmp_path):
    (tmp_path / "in" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for out, how in (("in", "is"), ("link/inner/x", "lies in"), (".", "contains"), ("link", "is")):
        with pytest.raises(pb.errors.ConfigError, match=f"which {how} .*in, from which"):
            refuse_overlap(tmp_path / out, [None, tmp_path / "none", tmp_path / "in"])
    refuse_overlap(tmp_path / "inn", [tmp_path / "in", tmp_path / "not" / "there"])


def test_a_delta_in_place_of_what_it_begins_at(steps, tmp_path):
    models = [tmp_path / str(number) for number in range(3)]
    export_checkpoint(steps[0], models[0])
    export_delta(steps[1], models[0], models[1])
    before = files_below(tmp_path)
    for since, out in ((0, models[0]), (1, models[1]), (1, models[0]), (0, models[0] / "x")):
        with pytest.raises(pb.errors.ConfigError, match="from which it is to be made"):
            export_delta(steps[2], models[since], out, REPLACE)
    assert files_below(tmp_path) == before
    pb.Predictor.open(models[1])
    export_delta(steps[2], models[1], models[2])
    export_delta(steps[2], models[0], models[2], REPLACE)


def test_commands(steps, data, tmp_path, pibroch):
    rows = write_csv(tmp_path / "rows.csv", raw_rows(40))
    copy = shutil.copytree(data, tmp_path / "data")
    inside = write_csv(copy / "rows.csv", raw_rows(40))
    assert pibroch("profile", data, "--out", tmp_path / "p")[0] == 0
    profile = tmp_path / "p"
    step = steps[0]
    before = files_below(tmp_path), files_below(step)
    schema = ("--schema", rows)
    for words in (
        ("data", "prepare", "csv", inside, *schema, "--out", copy, "--overwrite"),
        ("data", "prepare", "csv", rows, "--vocabularies", copy, "--out", copy, "--overwrite"),
        ("data", "prepare", "csv", rows, *schema, "--out", rows, "--overwrite"),
        ("profile", profile, "--to-samples", 99, "--out", profile),
        ("plan", "--profile", profile, "--shards", 2, "--out", profile),
        ("plan", "--profile", profile, "--shards", 2, "--out", tmp_path / "q", "--html", profile),
        ("predict", "--checkpoint", step, "--data", copy, "--out", step / "scores.csv"),
        ("evaluate", "--checkpoint", step, "--data", copy, "--predictions", copy / "scores.csv"),
        ("checkpoint", "convert", step, step / "model.pt", "--to", "dlrm"),
        ("export", step, "--out", step / "export"),
        ("export", step, "--onnx", step / "dense.onnx"),
    ):
        code, output = pibroch(*words)
        assert code == 2 and "from which it is to be made" in output, (words, output)
    assert (files_below(tmp_path), files_below(step)) == before
    EncodedDataset.open(copy).verify()
