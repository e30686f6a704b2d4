from pathlib import Path

import pytest

from forked import Program
from pibroch.cli import bench
from pibroch.errors import MissingDependencyError, StorageError

CHECKOUT = Path(__file__).resolve().parents[3]


def pibroch(*arguments, cwd=CHECKOUT):
    with Program("-m", "pibroch", *arguments, cwd=cwd) as program:
        return program.end()


def test_without_a_name_topics_are_listed():
    done = pibroch("bench")
    assert done.returncode == 0, done.stderr
    assert "single_process" in done.stdout
    assert "kernels" in done.stdout
    assert "--only step_time" in done.stdout


def test_an_unknown_topic_is_wrong_usage(tmp_path):
    done = pibroch("bench", "nothing", "--quick", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert done.returncode == 2
    assert "single_process" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lookahead", "kernels"])
def test_an_unknown_section_is_wrong_usage(name, tmp_path):
    done = pibroch("bench", name, "--only", "nothing", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert done.returncode == 2
    assert f"section 'nothing' of benchmark '{name}'" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_outside_a_checkout_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    with pytest.raises(MissingDependencyError, match="clone the repository"):
        bench.find_checkout()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "registry.py").touch()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    assert bench.find_checkout() == tmp_path


def test_a_folder_that_cannot_be_made_fails_before_the_measurement(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--out"):
        bench.bench("rpc", out=tmp_path / "file" / "out")
