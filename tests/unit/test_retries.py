"""What `make test` does of tests that fail once, on small suites of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SUITE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({flaky}))
def test_fails_once(number):
    tried = Path(f"tried-{{number}}")
    if not tried.exists():
        tried.touch()
        pytest.fail("the first time")

def test_passes():
    pass

@pytest.mark.skipif(not {broken}, reason="nothing is broken")
def test_fails():
    pytest.fail("always")
"""


@pytest.fixture
def run(tmp_path):
    def run_suite(*options, flaky, broken=False):
        (tmp_path / "test_small.py").write_text(SUITE.format(flaky=flaky, broken=broken))
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "retries", *options],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(TESTS), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return ran.returncode, ran.stdout

    return run_suite


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_what_passes_when_tried_again_is_counted_and_named(run, workers):
    code, output = run("--most-retried", "3", *workers, flaky=2)
    assert code == 0, output
    names = "test_small.py::test_fails_once[0], test_small.py::test_fails_once[1]"
    assert output.count(f"retried: 2 ({names})") == 1


def test_more_than_a_few_are_red(run):
    code, output = run("--most-retried", "3", flaky=4)
    assert code == 1
    assert "retried: 4 (" in output and "need at most 3" in output


def test_what_fails_twice_is_red_and_not_called_retried(run):
    code, output = run("--most-retried", "3", flaky=1, broken=True)
    assert code == 1
    assert "retried: 1 (test_small.py::test_fails_once[0])" in output


def test_nothing_is_tried_again_unless_asked_for_or_when_nothing_failed(run):
    code, output = run("--most-retried", "0", flaky=0)
    assert code == 0 and "retried" not in output
    code, output = run(flaky=1)
    assert code == 1 and "trying" not in output
