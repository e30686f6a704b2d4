import json
import re
from xml.etree import ElementTree

import pytest

from html_page import Page
from pibroch.errors import InputError, StorageError
from pibroch.observability.plots import MOST_POINTS, runs_plot, shard_bars
from pibroch.observability.report import write_report
from small_run import make_config, train_here


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return train_here(make_config(data), tmp_path_factory.mktemp("reported") / "a <b> run")[0].path


def test_the_page_is_whole_and_needs_nothing_else(run, tmp_path):
    text = write_report(run, tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.num_svg == 6 and page.open_tags == []
    assert all(reference.startswith(("#", "url(#")) for reference in page.references), (
        page.references
    )
    assert not re.search(r"@import|<script", text)
    for title in (
        "Loss",
        "AUC",
        "Throughput",
        "ROC",
        "Calibration",
        "Access skew",
        "Configuration",
        "Summary",
    ):
        assert f"<h2>{title}</h2>" in text
    summary = json.loads((run / "summary.json").read_text())
    assert (
        f"{summary['auc']:.4f}" in text
        and "a &lt;b&gt; run" in text
        and "initial_accumulator" not in text
    )


def test_a_run_that_goes_on_has_a_page_too(run, tmp_path):
    going_on = tmp_path / "run"
    going_on.mkdir()
    (going_on / "config.toml").write_text("seed = 1\n")
    assert "not finished" in write_report(going_on, tmp_path / "empty.html").read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines()[:15]
    (going_on / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "trai')
    assert Page(write_report(going_on, tmp_path / "some.html").read_text()).num_svg == 3


def test_no_run_and_no_place(run, tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        write_report(tmp_path, tmp_path / "page.html")
    with pytest.raises(StorageError):
        write_report(run, tmp_path / "missing" / "page.html")


def test_points_and_bars_of_a_plot_say_their_values():
    page = runs_plot(["first", "_second <2>"], [[(1, 0.5), (9, 0.25)], [(1, 0.6)]], [1, 1], "AUC")
    titles = re.findall(r"<title>(.*?)</title>", page)
    assert titles == [
        "first: 0.5 at step 1",
        "first: 0.25 at step 9",
        "_second &lt;2&gt;: 0.6 at step 1",
    ]
    ElementTree.fromstring(page)
    marks = [
        (float(x), float(y)) for x, y in re.findall(r'<circle cx="(.*?)" cy="(.*?)" r="5">', page)
    ]
    drawn = {
        (round(float(x), 1), round(float(y), 1))
        for x, y in re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style', page)
    }
    assert len(marks) == 3 and set(marks) <= drawn  # over the dots that people see
    bars = shard_bars([1.0, 2.0])
    assert re.findall(r"<title>(.*?)</title>", bars) == ["bytes: 1", "bytes: 2"]


def test_a_long_line_says_the_values_of_some_points():
    points = [(step, 1.0) for step in range(10 * MOST_POINTS)]
    page = runs_plot(["long"], [points], [1], "AUC")
    assert MOST_POINTS / 2 < page.count("<title>") <= MOST_POINTS
