"""``pibroch data`` as its own process."""

import json
import signal
import sys

import polars as pl
import pytest

from pibroch.cli.data import app
from pibroch.cli.main import main
from pibroch.data import EncodedDataset
from pibroch.data.spool import Spool
from pibroch.errors import InputError
from small_run import run_command

CSV = "clicked,price,user,tags\n" + "\n".join(f"{i % 2},{i}.5,u{i % 7},a|b" for i in range(100))
SCHEMA = (
    'label = "clicked"\n[dense.price]\n[categorical.user]\n[categorical.tags]\nmulti_hot = true\n'
)


@pytest.fixture
def csv_file(tmp_path):
    (tmp_path / "clicks.csv").write_text(CSV)
    (tmp_path / "clicks.toml").write_text(SCHEMA)
    return tmp_path / "clicks.csv"


def prepare_csv(tmp_path, *arguments):
    files = (
        tmp_path / "clicks.csv",
        "--schema",
        tmp_path / "clicks.toml",
        "--out",
        tmp_path / "out",
    )
    return run_command("data", "prepare", "csv", *files, *arguments)


def test_csv_to_a_dataset(csv_file, tmp_path):
    ended = prepare_csv(
        tmp_path,
        "--hash",
        "user=5",
        "--min-count",
        "3",
        "--split",
        "hash:0.8/0.1/0.1",
        "--seed",
        "1",
    )
    assert ended.returncode == 0, ended.stderr
    assert "100 samples" in ended.stdout
    dataset = EncodedDataset.open(tmp_path / "out")
    assert dataset.num_rows == {"user": 7, "tags": 4}
    assert dataset.schema.categorical[1].min_count == 3
    assert dataset.provenance["split"]["kind"] == "hash"
    described = run_command("data", "describe", tmp_path / "out", "--verify")
    assert described.returncode == 0
    assert "user" in described.stdout
    assert "1 dense features, 2 tables with 11 rows" in described.stdout
    toml = run_command("data", "describe", tmp_path / "out", "--schema")
    assert "[categorical.user]" in toml.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "csv", "{csv}", "--out", "{out}"], "without a schema"),
        (["prepare", "criteo", "{missing}", "--out", "{out}"], "no file"),
        (["prepare", "criteo", "{csv}", "--out", "{out}"], "1 columns instead of 40"),
        (["prepare", "avazu", "{csv}", "--out", "{out}"], "Avazu's header"),
        (
            ["prepare", "csv", "{parquet}", "--schema", "{toml}", "--out", "{out}"],
            "which is a Parquet file",
        ),
        (["prepare", "criteo", "{parquet}", "--out", "{out}"], "which is a Parquet file"),
        (["prepare", "parquet", "{csv}", "--schema", "{toml}", "--out", "{out}"], "Parquet"),
        (
            ["prepare", "csv", "{csv}", "--schema", "{toml}", "--out", "{out}", "--hash", "user"],
            "NAME=BUCKETS",
        ),
        (
            ["prepare", "csv", "{csv}", "--schema", "{toml}", "--out", "{out}", "--hash", "x=3"],
            "`x` to hash",
        ),
        (
            [
                "prepare",
                "csv",
                "{csv}",
                "--schema",
                "{toml}",
                "--out",
                "{out}",
                "--split",
                "time:1/1/1",
            ],
            "split",
        ),
        (["prepare", "csv", "{csv}", "--schema", "{csv}", "--out", "{out}"], "no TOML"),
        (
            [
                "prepare",
                "csv",
                "{csv}",
                "--schema",
                "{toml}",
                "--out",
                "{out}",
                "--raw",
                "--min-count",
                "3",
            ],
            "--raw with --min-count",
        ),
        (["describe", "{missing}"], "dataset.json"),
    ],
)
def test_wrong_input_says_what_is_needed(csv_file, tmp_path, arguments, message):
    paths = {
        "csv": csv_file,
        "toml": tmp_path / "clicks.toml",
        "out": tmp_path / "out",
        "missing": tmp_path / "nope",
    }
    paths["parquet"] = tmp_path / "clicks.parquet"
    pl.DataFrame({"clicked": [0, 1]}).write_parquet(paths["parquet"])
    with pytest.raises(InputError) as caught:
        app([argument.format(**paths) for argument in arguments], standalone_mode=False)
    assert caught.value.exit_code == 2
    assert message in caught.value.got + caught.value.need
    assert caught.value.need and caught.value.do
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_raw_ids_take_the_place_of_vocabularies(csv_file, tmp_path):
    ended = prepare_csv(tmp_path, "--raw", "--hash", "tags=5")
    assert ended.returncode == 0, ended.stderr
    assert "1 tables with 7 rows, 1 features with raw ids" in ended.stdout
    dataset = EncodedDataset.open(tmp_path / "out")
    assert dataset.num_rows == {"user": None, "tags": 7}
    described = run_command("data", "describe", tmp_path / "out")
    assert described.returncode == 0, described.stderr
    row = next(line for line in described.stdout.splitlines() if " user " in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["raw ids", "", "", "0.0%"]
    assert "1 dense features, 1 tables with 7 rows, 1 features with raw ids" in described.stdout
    options = ("--samples", 1000, "--out", tmp_path / "drawn", "--raw", "--multi-hot")
    assert run_command("data", "synthesize", *options).returncode == 0
    assert set(EncodedDataset.open(tmp_path / "drawn").num_rows.values()) == {None}


def test_ids_that_are_all_unknown_do_not_go_unsaid(csv_file, tmp_path):
    integers = 'encoding = "integer"\nnum_buckets = 9\n'
    (tmp_path / "clicks.toml").write_text(
        SCHEMA.replace("[categorical.tags]", integers + "[categorical.tags]")
    )
    ended = prepare_csv(tmp_path)
    warning = "`user`: 100.0% of its training ids are no whole numbers from 0 to 8"
    assert ended.returncode == 0 and warning in ended.stderr
    described = run_command("data", "describe", tmp_path / "out")
    assert warning in described.stdout
    row = next(line for line in described.stdout.splitlines() if " user " in line)
    assert row.split("│")[4:6] == [" 100.0%  ", " 0.0%    "]
    assert "click rate: train 0.5000, validation 0.4667, test 0.5333" in described.stdout


def test_ctrl_c_says_how_preparation_goes_on(csv_file, tmp_path, monkeypatch, capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    append = Spool.append

    def interrupted(spool, *arguments):
        append(spool, *arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Spool, "append", interrupted)
    command = [
        "data",
        "prepare",
        "csv",
        csv_file,
        "--schema",
        tmp_path / "clicks.toml",
        "--out",
        tmp_path / "out",
    ]
    monkeypatch.setattr(sys, "argv", ["pibroch", *map(str, command)])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == 130
    message = capsys.readouterr().err
    assert "the same command goes on where it was" in message and "training" not in message
    assert (tmp_path / "out.partial").exists()


def test_malformed_lines_are_counted_and_shown(csv_file, tmp_path):
    csv_file.write_text(CSV + "\n1,abc,u,\n")
    refused = prepare_csv(tmp_path)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert [line.split(":")[0] for line in refused.stderr.splitlines()] == ["got", "need", "do"]
    ended = prepare_csv(tmp_path, "--max-bad-fraction", "0.01")
    assert ended.returncode == 0
    assert "1 malformed records left out" in ended.stdout
    assert "line 102: `abc` as price" in ended.stdout.replace("\n", " ")


def test_synthesize_prints_the_best_auc(tmp_path):
    out = tmp_path / "out"
    arguments = (
        "--samples",
        "3000",
        "--out",
        out,
        "--seed",
        "3",
        "--table-rows",
        "50",
        "--multi-hot",
    )
    ended = run_command("data", "synthesize", *arguments)
    assert ended.returncode == 0, ended.stderr
    truth = json.loads((out / "truth.json").read_text())
    assert f"{truth['test']['auc']:.4f}" in ended.stdout
    assert EncodedDataset.open(out).schema.categorical[2].multi_hot
    again = run_command("data", "synthesize", *arguments)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


@pytest.mark.parametrize("command", ["prepare", "synthesize"])
def test_help_teaches_by_example(command):
    ended = run_command("data", command, "--help")
    assert ended.returncode == 0
    assert f"pibroch data {command} " in ended.stdout
    assert "Examples" in ended.stdout
