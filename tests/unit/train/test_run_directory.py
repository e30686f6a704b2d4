"""A run's folder."""

import os

from pibroch.train.run_directory import LOCK, RunDirectory


def test_the_lock_is_its_owner_s_alone(tmp_path):
    """Whoever can read a file can lock it, and would keep the run from going on."""
    before = os.umask(0)
    try:
        run = RunDirectory(tmp_path / "run")
        run.claim()
    finally:
        os.umask(before)
    assert (run.path / LOCK).stat().st_mode & 0o777 == 0o600
    assert (run.path / LOCK).read_text().startswith(f"process {os.getpid()} on")
