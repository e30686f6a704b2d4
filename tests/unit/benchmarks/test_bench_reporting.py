import csv
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import find_topic, topics
from benchmarks.results import Report, join, markdown, table, write
from benchmarks.runner import Schedule, Times
from benchmarks.topics import kernels, single_process

from pibroch.errors import ConfigError

ROWS = [
    {
        "ids": "zipf",
        "dim": dim,
        "contender": name,
        "p50_ms": value,
        "samples_per_second": 1e6 / value,
        "low": 1.0,
        "high": 2e5,
    }
    for dim in (16, 64)
    for name, value in (("pibroch", 10.04), ("plain torch", 20.0))
]
PLOT = PlotSpec("samples_per_second", ("ids",), "dim", "contender", "samples/s", "low", "high")
COLUMNS = ["dim", "contender", "p50_ms", "samples_per_second", "over_torch"]


def make_report():
    return Report(
        "t", "A title", [dict(row) for row in ROWS], COLUMNS, PLOT, ["a note"], provenance()
    )


def test_a_report_becomes_four_files(tmp_path):
    paths = write(make_report(), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [
        "measurements.csv",
        "table.md",
        "plot.png",
        "origin.json",
    ]
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["p50_ms"]) for row in rows] == [10.04, 20.0, 10.04, 20.0]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    page = paths[1].read_text()
    for needed in ("# A title", "a note", "command", "commit", "hardware", "date"):
        assert needed in page
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(
        path.name for path in paths
    )


def test_ratios_of_committed_results_are_own_time_over_the_named_contenders():
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    torch_ms = {}
    for row in _measured(results / "single_process"):
        setting = row["ids"], row["optimizer"], row["dim"]
        torch_ms |= {setting: float(row["p50_ms"])} if row["contender"] == "plain torch" else {}
    for row in _measured(results / "single_process"):
        setting = row["ids"], row["optimizer"], row["dim"]
        assert bool(row["over_torch"]) == (setting in torch_ms)
        if setting in torch_ms:
            assert float(row["over_torch"]) == pytest.approx(
                float(row["p50_ms"]) / torch_ms[setting]
            )
    for topic in ("single_process", "kernels", "rpc/calls"):
        assert {
            row["over_pibroch"]
            for row in _measured(results / topic)
            if row["contender"] == "pibroch"
        } <= {
            "1.0",
            "",
        }


def _measured(folder):
    with (folder / "measurements.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_page_of_sections_keeps_those_that_were_not_measured_again(tmp_path):
    for section, value in (("second", 1.0), ("first", 2.0), ("second", 3.0)):
        report = make_report()
        report.title = f"The {section}"
        report.rows = [{"dim": 16, "p50_ms": value}]
        write(report, tmp_path / section)
        page = join(tmp_path, "t: a topic", ("first", "second", "never measured")).read_text()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    origin = "### Where this comes from"
    assert headings == ["# t: a topic", "## The first", origin, "## The second", origin]
    assert "| 16 | – | 2.0 |" in page  # noqa: RUF001
    assert "| 16 | – | 3.0 |" in page  # noqa: RUF001
    assert "| 16 | – | 1.0 |" not in page  # noqa: RUF001
    assert "![first](first/plot.png)" in page


def test_a_table_rounds_by_what_a_column_holds():
    lines = table(make_report()).splitlines()
    assert lines[1] == "|--:|---|--:|--:|---|"
    assert lines[2] == "| 16 | pibroch | 10.0 | 99,602 | – |"  # noqa: RUF001
    assert markdown(make_report()).count("plain torch") == 2


def test_percentiles_and_ratios_by_round():
    ours = Times([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]], [1.0])
    peer = Times([[4.0, 4.0, 9.0], [3.0, 3.0, 3.0]], [1.0])
    assert peer.ratios_to(ours) == [2.0, 1.5]
    assert ours.percentile(50) == 2.0
    assert ours.percentile(0) == 1.0


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"steps_per_round": 9}])
def test_too_few_steps_are_refused(wrong):
    with pytest.raises(ConfigError, match="p20 and p80"):
        Schedule(**wrong)


def test_topics_are_found_and_an_unknown_one_is_named():
    assert {"kernels", "single_process"} <= set(topics())
    assert list(topics()) == sorted(topics())
    with pytest.raises(ConfigError, match=r"'nothing'.*single_process"):
        find_topic("nothing")


def test_quick_is_a_part_of_the_whole():
    for module in (kernels, single_process):
        assert set(module.settings(quick=True)) < set(module.settings(quick=False))


@pytest.mark.alone  # the machine's load
def test_foreign_load_tells_workers_from_others():
    """The same busy process, once counted as a worker and once not, over the same time."""
    busy = (
        "import time\nwhile time.process_time() < 0.5: pass\nprint('busy no more',"
        " flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        as_worker = ForeignLoad()
        as_other = ForeignLoad()
        as_worker.add_worker(child.pid)
        child.stdout.readline()
        difference = as_other.share() - as_worker.share()
        child.communicate(b"\n", timeout=60)
    assert difference > 0.02
    assert 0.0 <= as_worker.share() <= 1.0


@pytest.mark.parametrize("out", [["--out", "/somewhere"], ["--out=/somewhere"], []])
def test_provenance_says_what_was_run_and_not_where_it_went(monkeypatch, out):
    monkeypatch.setattr("sys.argv", ["/bin/pibroch", "bench", *out, "kernels", "--only", "a b"])
    assert provenance()["command"] == "pibroch bench kernels --only 'a b'"
