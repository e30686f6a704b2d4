"""What is left of the machine's memory, or of that of the groups that this process is in."""

import os
import subprocess
import sys

import pytest

from pibroch.observability.memory import free_memory, peak_rss_bytes, rss_bytes


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("max", 5, 6 << 10), (4096, 1024, 3072), (4096, 9999, 0)]
)
def test_a_containers_limit_counts(tmp_path, limit, used, free):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 6 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert free_memory(tmp_path, tmp_path) == free


def test_where_the_system_says_nothing_half_of_the_memory_counts(tmp_path):
    assert free_memory(tmp_path, tmp_path) > 1 << 20


GROUP = {
    2: ("", "0::{}", ("memory.max", "memory.current", "inactive_file")),
    1: (
        "memory",
        "4:memory:{}",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
}


def make_group(groups, version, path, limit, used, cached=0):
    folder, _, (limit_file, used_file, cached_name) = GROUP[version]
    group = groups / folder / path
    group.mkdir(parents=True, exist_ok=True)
    (group / limit_file).write_text(f"{limit}\n")
    (group / used_file).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"cache 77\n{cached_name} {cached}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_narrowest_of_all_groups_around_this_process_counts(tmp_path, version):
    (tmp_path / "meminfo").write_text("MemAvailable: 9 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(
        "7:cpu:/elsewhere\n" + GROUP[version][1].format("/service/job") + "\n"
    )
    make_group(tmp_path, version, "service", 8000, 1000)
    make_group(tmp_path, version, "service/job", 1 << 62, 900)
    make_group(tmp_path, version, "elsewhere", 1, 1)
    assert free_memory(tmp_path, tmp_path) == 7000
    make_group(tmp_path, version, "service/job", 4000, 3000, cached=500)
    assert free_memory(tmp_path, tmp_path) == 1500, "files that were read give way"


def test_a_group_whose_path_leads_out_of_what_this_process_sees_is_left_out(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable: 9 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/../..\n")
    assert free_memory(tmp_path, tmp_path) == 9 << 10


def test_the_peak_is_what_was_held_once():
    before = rss_bytes()
    held = bytearray(os.urandom(1 << 20) * 64)
    during = rss_bytes()
    del held
    assert before + (60 << 20) < during <= peak_rss_bytes()


PEAK_AFTER_EXEC = """
import os, sys
held = bytearray(os.urandom(1 << 20) * 512)
told = "from pibroch.observability.memory import peak_rss_bytes; print(peak_rss_bytes())"
os.execv(sys.executable, [sys.executable, "-c", told])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_the_peak_is_not_that_of_the_program_before():
    told = subprocess.run(
        [sys.executable, "-c", PEAK_AFTER_EXEC], capture_output=True, text=True, timeout=120
    )
    assert 0 < int(told.stdout) < 500 << 20, told.stderr
