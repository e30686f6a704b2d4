"""What a run says of its tables of raw ids."""

import re

import pytest

from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.observability.report import write_report
from pibroch.state.checkpoint_folder import CheckpointFolder
from small_run import make_config, run_command, train_here

ROWS = "embedding.rows={name='hashed', capacity=300, admit_after=2, expire_after=16}"
NO_BATCH_NORM = "model.batch_norm=false"
COUNTS = ("lookups", "hits", "admissions", "evictions", "expiries")


@pytest.fixture(scope="module")
def raw_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "raw"
    synthesize(SyntheticOptions(3000, max_table_rows=2000, raw=True), folder)
    return folder


@pytest.fixture(scope="module")
def run(raw_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train_here(make_config(raw_data, ROWS, NO_BATCH_NORM, "train.log_every=4"), folder)[0]


def test_records_add_up_to_the_summary(run):
    records = [each["raw_ids"] for each in run.metrics() if each["kind"] == "training"]
    summary = run.read_json("summary.json")["raw_ids"]
    assert summary.keys() == {f"C{number}" for number in range(1, 27)}
    for table, totals in summary.items():
        for name in COUNTS:
            assert totals[name] == sum(record[table][name] for record in records)
        assert totals["lookups"] == 4200 and totals["hit_rate"] == totals["hits"] / 4200
        assert totals["used"] == records[-1][table]["used"] <= totals["capacity"] == 300
        gone = totals["evictions"] + totals["expiries"]
        assert totals["used"] == totals["admissions"] - gone
        assert 0 < totals["search_p99"] < 64
    assert (
        summary["C3"]["evictions"] > 0 < summary["C3"]["expiries"] and summary["C3"]["candidates"]
    )


def test_a_report_has_a_table_and_a_plot(run, tmp_path):
    text = write_report(run.path, tmp_path / "page.html").read_text()
    assert "<h2>Tables of raw ids</h2>" in text and "<h2>Rows of raw ids</h2>" in text
    totals = run.read_json("summary.json")["raw_ids"]["C3"]
    assert f"{totals['used']:,} of 300 rows used" in text
    assert f"{totals['evictions']:,} evicted, {totals['expiries']:,} expired" in text


def test_a_checkpoint_says_how_full_they_are(run):
    ended = run_command("checkpoint", "inspect", CheckpointFolder(run.checkpoints_path, 2).latest())
    assert ended.returncode == 0, ended.stderr
    totals = run.read_json("summary.json")["raw_ids"]["C3"]
    (line,) = [each for each in ended.stdout.splitlines() if re.search(r"C3 .*300.* 42 ", each)]
    numbers = [int(each.replace(",", "")) for each in re.findall(r"[\d,]+(?![.\d])", line)]
    names = ("used", "capacity", "candidates", "admissions", "evictions", "expiries", "steps")
    assert numbers[1:8] == [totals[name] for name in names]
    assert f"{totals['hit_rate']:.4f}" in line
