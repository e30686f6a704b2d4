import json
import re

import pytest
import torch

from html_page import Page
from pibroch.config.differences import settings
from pibroch.observability.compare import ComparedRun, write_comparison
from pibroch.observability.run_files import read_run
from several_labels import prepared
from small_run import make_config, make_dataset, run_command, train_here

CAUTION = "Figures of one data set say nothing of those of another"


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Two on the same data, one of another model and length, and one on other data."""
    folder = tmp_path_factory.mktemp("compared")
    other = make_dataset(folder / "data", num_samples=2000)
    configs = {
        "_plain $x$ <b>": make_config(data),
        "crossed": make_config(data, "model.name=dcnv2", "optimizer.lr=1e-7", "train.epochs=1"),
        "elsewhere": make_config(other, "train.batch_size=50"),
    }
    return {name: train_here(config, folder / name)[0].path for name, config in configs.items()}


def page_of(out, *folders):
    records = [read_run(folder) for folder in folders]
    compared = [ComparedRun(each.name, each, settings(each.settings)) for each in records]
    return write_comparison(out, compared).read_text()


def cells(text, heading):
    """The rows of a table of the page by their first cell."""
    table = text[text.index(f"<h2>{heading}</h2>") :].partition("</table>")[0]
    rows = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in table.split("<tr>")[1:]]
    return {first: rest for first, *rest in rows}


def test_runs_on_the_same_data(runs, tmp_path):
    plain, crossed = runs["_plain $x$ <b>"], runs["crossed"]
    text = page_of(tmp_path / "page.html", plain, crossed)
    page = Page(text)
    assert page.num_svg == 6 and page.open_tags == []
    assert all(reference.startswith(("#", "url(#")) for reference in page.references)
    assert not re.search(r"@import|<script", text)
    for title in ("Training loss", "AUC", "log loss", "normalised entropy", "PR-AUC"):
        assert f"<h2>{title}</h2>" in text
    # in the legend of each plot, and at the head of each table
    assert text.count("_plain $x$ &lt;b&gt;") >= 6 + 4
    assert "All runs have the same data" in text and CAUTION not in text and "(data 1)" not in text
    final = cells(text, "Final figures")
    summaries = [json.loads((run / "summary.json").read_text()) for run in (plain, crossed)]
    assert final["data"] == ["data 1", "data 1"]
    assert final["steps"] == [f"{summary['steps']}" for summary in summaries]
    assert final["test AUC"] == [f"{summary['auc']:.4f}" for summary in summaries]
    differing = cells(text, "Settings that differ")
    assert differing["model.name"] == ["dlrm", "dcnv2"]
    assert differing["optimizer.lr"] == ["0.01", "1e-07"]
    assert differing["train.epochs"] == ["2", "1"]
    assert "seed" not in differing and "train.batch_size" not in differing
    trained_on = cells(text, "Trained on")
    assert trained_on["train samples"] == ["2,100", "2,100"]
    assert len(set(trained_on["contents"])) == 1
    assert cells(text, "Versions and machine")["torch"] == [torch.__version__] * 2


def test_no_figure_of_other_data_goes_unsaid(runs, tmp_path):
    text = page_of(tmp_path / "page.html", *runs.values())
    assert CAUTION in text and "All runs have the same data" not in text
    assert cells(text, "Final figures")["data"] == ["data 1", "data 1", "data 2"]
    trained_on = cells(text, "Trained on")
    assert len(set(trained_on["contents"])) == 2
    assert trained_on["validation samples"] == ["450", "450", "300"]
    notes = re.findall(r'<span class="note">(.*?)</span>', text)
    assert len(notes) == 6
    for note in notes:
        assert "different data: compare within one data set alone" in note
        assert "batch sizes differ" in note
    legends = re.sub("<title>.*?</title>", "", text)
    assert legends.count("crossed (data 1)") == legends.count("elsewhere (data 2)") == 6
    assert "stroke-dasharray" in text


def test_contents_decide_and_not_the_schema(data, runs, tmp_path):
    """Data generated from another seed have the same schema and as many rows and samples."""
    from pibroch.data.synthetic import SyntheticOptions, synthesize

    synthesize(SyntheticOptions(num_samples=3000, max_table_rows=40, seed=7), tmp_path / "data")
    run, _ = train_here(make_config(tmp_path / "data", "train.steps=3"), tmp_path / "run")
    text = page_of(tmp_path / "page.html", runs["crossed"], run.path)
    trained_on = cells(text, "Trained on")
    assert len(set(trained_on["schema and vocabularies"])) == 1
    assert len(set(trained_on["train samples"])) == 1
    assert len(set(trained_on["contents"])) == 2 and CAUTION in text


def test_other_losses_and_a_run_that_goes_on(runs, tmp_path):
    going_on = tmp_path / "going on"
    going_on.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (going_on / name).write_bytes((runs["crossed"] / name).read_bytes())
    text = page_of(tmp_path / "page.html", runs["crossed"], going_on)
    assert "Not finished: going on." in text
    assert "Which data going on had is not recorded" in text and CAUTION in text
    assert cells(text, "Final figures")["test AUC"][1] == "none"
    assert cells(text, "Trained on")["contents"][1] == "none"
    config = (going_on / "config.toml").read_text().replace('name = "bce"', 'name = "focal"')
    (going_on / "config.toml").write_text(config)
    other = page_of(tmp_path / "page.html", runs["crossed"], going_on)
    assert "the losses differ" in other and "the losses differ" not in text


def test_the_terminal_says_it_too(runs, tmp_path):
    folders = [runs["_plain $x$ <b>"], runs["crossed"], runs["elsewhere"]]
    shown = run_command("compare", *folders, "--out", tmp_path / "page.html")
    assert shown.returncode == 0, shown.stderr
    rows = [re.split(r"  +", line.strip()) for line in shown.stdout.splitlines()]
    summaries = [json.loads((run / "summary.json").read_text()) for run in folders]
    assert ["Final figures", "_plain $x$ <b>", "crossed", "elsewhere"] in rows
    assert ["data", "data 1", "data 1", "data 2"] in rows
    assert ["test AUC", *(f"{each['auc']:.4f}" for each in summaries)] in rows
    assert ["train.epochs", "2", "1", "2"] in rows
    assert rows[-1] == [f"wrote {tmp_path / 'page.html'}"]

    asked = run_command("compare", *folders, "--out", tmp_path / "page.html", "--json")
    assert asked.returncode == 0 and "wrote" in asked.stderr
    plain = json.loads(asked.stdout)["runs"]
    assert [each["data_set"] for each in plain] == [1, 1, 2]
    assert [each["test"] for each in plain] == [each["tasks"] for each in summaries]
    assert [each["steps"] for each in plain] == [each["steps"] for each in summaries]
    assert all(each["is_finished"] and each["validation"] for each in plain)
    assert plain[1]["settings"]["model.name"] == "dcnv2"
    assert plain[1]["data"]["samples"]["train"] == 2100
    assert "seed" not in plain[0]["settings"]


def test_several_labels(tmp_path):
    data = prepared(tmp_path)
    changes = ["model={name='mmoe', dim=4, top=[8]}", "tasks.seconds.loss=mse", "train.epochs=1"]
    folders = [
        train_here(make_config(data, *changes, f"seed={seed}"), tmp_path / f"run{seed}")[0].path
        for seed in (1, 2)
    ]
    text = page_of(tmp_path / "page.html", *folders)
    for title in ("AUC of click", "GAUC of click", "RMSE of seconds"):
        assert f"<h2>{title}</h2>" in text
    summary = json.loads((folders[1] / "summary.json").read_text())
    rmse = summary["tasks"]["seconds"]["rmse"]
    assert cells(text, "Final figures")["test RMSE of seconds"][1] == f"{rmse:,.4f}"
    assert cells(text, "Settings that differ") == {"": ["run1", "run2"], "seed": ["1", "2"]}
