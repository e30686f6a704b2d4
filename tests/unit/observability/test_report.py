import json
import re
from xml.etree import ElementTree

import pytest

from html_page import Page
from pibroch.errors import InputError, StorageError
from pibroch.observability.compare import ComparedRun, write_comparison
from pibroch.observability.plots import MOST_POINTS, runs_plot, shard_bars
from pibroch.observability.report import write_report
from pibroch.observability.run_files import read_run
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


ODD_LINES = (
    [3],
    {"step": 3},
    {"kind": ["training"], "step": 3},
    {"kind": "training", "step": -1, "loss": 0.5, "samples_per_second": 1.0},
    {"kind": "training", "step": 10**400, "loss": 0.5, "samples_per_second": 1.0},
    {"kind": "training", "step": 3, "loss": None, "samples_per_second": 1.0},
    {"kind": "training", "step": 3, "loss": 0.5, "samples_per_second": 1.0, "raw_ids": {"a": 1}},
    {"kind": "evaluation", "step": 3, "split": "validation", "auc": "good"},
    {"kind": "window", "step": 3, "begin_ms": 1e300, "end_ms": 0, "auc": None},
)
ODD_FILES = {
    "summary.json": ([], {"auc": 0.5}, "x"),
    "evaluation.json": ({"curves": {"predicted": 3}}, {"tasks": {"a": {"auc": [1]}}}, 3),
    "plan_decay.json": ([{"step": 1}], {"step": 1}, [1]),
    "data.json": ({"samples": {"train": "many"}}, {"digest": 3}, []),
    "versions.json": ([1], "x"),
}


@pytest.fixture
def odd(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.toml").write_text("seed = 1\n")
    return folder


def test_evaluations_are_those_of_the_validation_split(odd):
    line = {"kind": "evaluation", "step": 1, "auc": 0.5, "logloss": 0.6, "is_best": True}
    lines = [line | {"split": split} for split in ("validation", "test", "validation")]
    (odd / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert [each["split"] for each in read_run(odd).evaluations] == ["validation", "validation"]


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_record_of_another_form_is_refused(odd, line):
    (odd / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, which is damaged"):
        read_run(odd)


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, all_ in ODD_FILES.items() for content in all_]
)
def test_a_file_of_another_form_is_refused(odd, name, content):
    (odd / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"{name}, which is damaged"):
        read_run(odd)


@pytest.mark.parametrize("text", ["seed = ", "\ufeffseed = 1", "[" * 5000, "a = " + "[" * 99999])
def test_settings_that_are_no_toml_are_refused(odd, text):
    (odd / "config.toml").write_text(text)
    with pytest.raises(InputError, match=r"config\.toml, which is damaged"):
        read_run(odd)


def test_names_and_figures_that_cannot_be_drawn_have_a_page(odd, tmp_path):
    lines = [
        {"kind": "training", "step": step, "loss": loss, "samples_per_second": 1e308}
        for step, loss in enumerate((0.5, float("nan"), float("inf"), 1e308))
    ]
    figures = {r"$\bad{$": 0.5, "_hidden": -1e308}
    about = {"split": "validation", "auc": float("nan"), "logloss": 1e308, "is_best": True}
    lines += [{"kind": "evaluation", "step": 1, **about, "tasks": {r"$\frac$": figures}}]
    (odd / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Page(write_report(odd, tmp_path / "page.html").read_text()).open_tags == []
    runs = [ComparedRun(rf"$\{name}{{$", read_run(odd), {}) for name in "ab"]
    page = write_comparison(tmp_path / "both.html", runs).read_text()
    assert r"$\bad{$" in page and r"$\a{$" in page
