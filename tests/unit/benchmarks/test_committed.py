"""What is committed of the benchmarks.

The page names it, each result says from which commit it is, one command makes all.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.registry import topics

from forked import Program

CHECKOUT = Path(__file__).resolve().parents[3]
RESULTS = CHECKOUT / "benchmarks" / "results"


def git(*arguments, cwd=CHECKOUT):
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_names_all_topics_their_sections_and_what_is_committed():
    page = (CHECKOUT / "docs" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\| ([^|]+) \| [^|]+\| [^|]+\|$", page, re.MULTILINE)
    named = {name: (re.findall(r"`(\w+)`", sections), text) for name, sections, text in rows}
    assert list(named) == list(topics())
    for name, topic in topics().items():
        sections, text = named[name]
        assert tuple(sections) == topic.sections, name
        results = [each for each in sections if (RESULTS / name / each / "origin.json").exists()]
        if not sections:
            is_there = (RESULTS / name / "origin.json").exists()
            assert text == ("yes" if is_there else "no"), name
        else:
            listed = sections if text == "all" else re.findall(r"`(\w+)`", text)
            assert listed == results, name


def test_each_result_says_where_it_comes_from():
    pages_of_topics = {RESULTS / name / "table.md" for name in topics()}
    unknown = {
        path.relative_to(RESULTS).as_posix()
        for path in RESULTS.rglob("*")
        if path.is_file()
        and path not in pages_of_topics
        and not (path.parent / "origin.json").is_file()
    }
    assert not unknown, f"no origin.json beside {sorted(unknown)}: write them by `pibroch bench`"


def test_each_result_is_of_a_clean_commit_of_this_history():
    if (
        not (CHECKOUT / ".git").exists()
        or git("rev-parse", "--is-shallow-repository").strip() == "true"
    ):
        pytest.skip("needs the whole history")
    history = git("rev-list", "HEAD").split()
    stale = set()
    for path in RESULTS.rglob("origin.json"):
        commit = json.loads(path.read_text())["commit"]
        if not (len(commit) >= 7 and any(each.startswith(commit) for each in history)):
            stale.add(path.parent.relative_to(RESULTS).as_posix())
    assert not stale, f"measured at no clean commit: {sorted(stale)}"


TOPIC = """
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import topic
from benchmarks.results import Report
from pibroch.errors import ConfigError

@topic({name!r}, "counts to one", sections={sections!r})
def run(options):
    if options.section == "broken":
        raise ConfigError("nothing to count")
    rows = [{{"contender": "a", "case": "1", "p50_ms": 1.0, "over": 1.0}}]
    plot = PlotSpec("over", ("case",), "case", "contender", "x", "over", "over", 1)
    return Report({name!r}, "Counting", rows, ["contender", "p50_ms"], plot, [], provenance())
"""


@pytest.fixture
def checkout(tmp_path):
    """A repository with pibroch, its benchmarks, and two topics that take no time."""
    leave_out = shutil.ignore_patterns("results", "peers", "__pycache__", "topics")
    for name in ("src", "benchmarks"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=leave_out)
    folder = tmp_path / "benchmarks" / "topics"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text(TOPIC.format(name="one", sections=()))
    (folder / "parts.py").write_text(TOPIC.format(name="parts", sections=("broken", "whole")))
    (folder / "unwanted.py").write_text(TOPIC.format(name="unwanted", sections=()))
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git("init", "-q", cwd=tmp_path)
    git("config", "user.email", "a@example.org", cwd=tmp_path)
    git("config", "user.name", "a", cwd=tmp_path)
    git("add", "-A", cwd=tmp_path)
    git("commit", "-qm", "all", cwd=tmp_path)
    return tmp_path


def bench(checkout, *arguments):
    paths = os.pathsep.join([str(checkout / "src"), str(checkout)])
    return subprocess.run(
        [sys.executable, "-m", "pibroch", "bench", *arguments],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
    )


def test_all_topics_at_one_commit(checkout):
    results = checkout / "benchmarks" / "results"
    (checkout / "src" / "changed.py").write_text("")
    refused = bench(checkout, "all", "--committed")
    assert refused.returncode == 2 and "changes in src/changed.py" in refused.stderr, refused.stderr
    assert not results.exists()
    (checkout / "src" / "changed.py").unlink()
    done = bench(checkout, "all", "--committed", "--skip", "unwanted")
    assert done.returncode == 1 and "failed: parts/broken" in done.stderr, done.stderr
    assert "[1/3] one: measured" in done.stderr and "nothing to count" in done.stderr
    commit = git("rev-parse", "--short", "HEAD", cwd=checkout).strip()
    for section in ("one", "parts/whole"):
        origin = json.loads((results / section / "origin.json").read_text())
        assert origin["commit"] == commit and origin["command"].startswith("pibroch bench "), origin
    assert not (results / "unwanted").exists()
    again = bench(checkout, "all", "--committed")
    assert "2 of 4 sections to measure" in again.stderr, again.stderr
    assert "] one:" not in again.stderr and "] unwanted: measured" in again.stderr


@pytest.mark.parametrize(
    "arguments", [["all"], ["kernels", "--committed"], ["all", "--committed", "--quick"]]
)
def test_wrong_usage(arguments):
    with Program("-m", "pibroch", "bench", *arguments, cwd=CHECKOUT) as program:
        assert program.end().returncode == 2
