"""Ranks on processors of several kinds say so; with one setting for all they have the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("rounding_program.py")
PLAIN = {"NUMBA_CPU_NAME": "generic", "ATEN_CPU_CAPABILITY": "default"}


def trained(store, *settings_by_rank):
    """Each rank's weights, by their digest, and its log."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), str(store)],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, settings in enumerate(settings_by_rank)
    ]
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return zip(*outputs, strict=True)


def test_one_setting_for_all_ranks_gives_the_same_bits(tmp_path):
    (first, second), logs = trained(tmp_path / "store", PLAIN, PLAIN)
    assert first == second
    assert logs == ("", "")


def test_processors_of_several_kinds_are_said(tmp_path):
    (first, second), logs = trained(tmp_path / "store", {}, PLAIN)
    assert logs[0].count("WARNING ranks round differently: ranks [0]: ") == 1
    assert "; ranks [1]: generic, torch DEFAULT (torch " in logs[0]
    assert "ATEN_CPU_CAPABILITY alike for all ranks" in logs[0]
    assert logs[1] == ""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no instructions by which torch would round otherwise")
    assert first != second  # else the warning would be about nothing
