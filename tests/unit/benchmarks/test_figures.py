"""Figures of the pages and tables of the results are what their measurements say."""

import pytest
from benchmarks import figures
from benchmarks.figures import filled, pages, tables, written_like
from benchmarks.provenance import CHECKOUT

from pibroch.errors import ConfigError

FILL = "python -m benchmarks.figures --fill"
PAGE = """A step takes 98<!--step--> ms, .9<!--gain--> of the other's, **1,000**<!--most--> at most.

<!-- figures
from topic/section p50_ms dim=16
step contender=ours
gain "contender=the others" / contender=ours
most max dim=16|64
-->
"""
MEASUREMENTS = """contender,dim,rate,p50_ms,peak_mb,delta
ours,16,1gbit,98.4,,1
the others,16,1gbit,88.6,7,1
ours,64,1gbit,1000.2,8,-2
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "topic" / "section"
    folder.mkdir(parents=True)
    (folder / "measurements.csv").write_text(MEASUREMENTS)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "CHECKOUT", tmp_path)
    figures.measurements.cache_clear()
    yield folder
    figures.measurements.cache_clear()


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_figures_of_a_page_are_those_of_their_files(path):
    _, differences = filled(path.read_text())
    lines = "\n".join(map(str, differences))
    assert not differences, f"{path.relative_to(CHECKOUT)}: do `{FILL}`\n{lines}"


def test_tables_of_results_are_what_their_measurements_give():
    names = {
        path.relative_to(figures.RESULTS).as_posix(): path.read_text() == rebuild()
        for path, rebuild in tables()
    }
    assert names.keys() == {
        path.relative_to(figures.RESULTS).as_posix() for path in figures.RESULTS.rglob("table.md")
    }
    different = [name for name, is_equal in names.items() if not is_equal]
    assert not different, f"other than their measurements.csv: {different}; do `{FILL}`"


def test_a_figure_that_its_file_does_not_give_is_named_and_written(results):
    assert filled(PAGE) == (PAGE, [])
    old = PAGE.replace("98", "97").replace("1,000", "2,000")
    new, differences = filled(old)
    assert new == PAGE
    assert [str(each) for each in differences] == [
        "line 1: got 97 for step, need 98 (topic/section: step contender=ours)",
        "line 1: got 2,000 for most, need 1,000 (topic/section: most max dim=16|64)",
    ]


@pytest.mark.parametrize(
    ("text", "value", "written"),
    [
        ("98", 7.6, "8"),
        (".98", 1.234, "1.23"),
        ("1.20", 0.98, "0.98"),
        ("-.55", 0.01, ".01"),
        ("+.55", 0.01, "+.01"),
        ("+.55", -0.01, "-.01"),
        ("1,367", 999.7, "1,000"),
        ("9,999", 12.2, "12"),
        ("1367", 13670, "13,670"),
    ],
)
def test_a_figure_keeps_its_form(text, value, written):
    assert written_like(text, value) == written


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("x min", 88.6),
        ("x dim=16 mean", 93.5),
        ("x dim=16 sum *10", 1870),
        ("x dim=64|16 median", 98.4),
        ("x num_rows rate=1gbit", 3),
        ("x abs dim=64 delta", 2),
        ("x num_rows dim>=17", 1),
        ("x max peak_mb<=7", 88.6),
        ('x peak_mb "contender=the others"', 7),
        ("x peak_mb max", 8),
        ("x dim=64 / dim=16 contender=ours", 1000.2 / 98.4),
        ("x dim=64 peak_mb *100 / p50_ms", 800 / 1000.2),
    ],
)
def test_what_a_line_selects(results, line, value):
    page = f"0.000<!--x-->\n\n<!-- figures\nfrom topic/section p50_ms\n{line}\n-->\n"
    assert filled(page)[0].startswith(f"{value:.3f}<!--x-->")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("from topic/section p50_ms\nx dim=16", "2 values"),
        ("from topic/section p50_ms\nx dim=32 max", "0 values"),
        ("from topic/section p50_ms\nx width=32", "column 'width'"),
        ("from topic/section p50_s\nx dim=64", "column 'p50_s'"),
        ("from topic p50_ms\nx dim=64", "no topic/measurements.csv"),
        ("x dim=64", "before any `from`"),
        ("from topic/section p50_ms\nx dim=64\nx dim=64", "a second 'x'"),
        ("from topic/section p50_ms\ny dim=64", "['x'] without a source, sources ['y']"),
    ],
)
def test_a_source_that_is_none(results, lines, problem):
    with pytest.raises(ConfigError) as error:
        filled(f"1<!--x-->\n\n<!-- figures\n{lines}\n-->\n")
    assert problem in str(error.value)
