import json
import re

import pytest

from html_page import Page
from pibroch.errors import InputError, StorageError
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
