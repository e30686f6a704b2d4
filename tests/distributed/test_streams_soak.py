"""Generator, two trainers, publishing, a server and a client go on for long, and do not grow.

``PIBROCH_SOAK_STREAM_S`` says for how long; ``PIBROCH_SOAK_STREAM_OUT`` names a file for what was
seen of each process, as JSON lines.
"""

import json
import os
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from examples.stream import start_all

SECONDS = int(os.environ.get("PIBROCH_SOAK_STREAM_S", "0"))
OUT = os.environ.get("PIBROCH_SOAK_STREAM_OUT")
RATE = 500
EVERY_S = 0.5
LARGER = 1.05
LARGER_MB = 24
LARGER_COUNT = 12
"""What may be larger in the last quarter than in the second: allocators settle. Descriptors rise
with each delta and fall with the next whole version, so the least of them are compared."""


@pytest.mark.skipif(SECONDS < 300, reason="minutes show what grows: PIBROCH_SOAK_STREAM_S=1800")
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_grows(tmp_path):
    seen = []
    with ExitStack() as processes:
        parts = start_all(processes, tmp_path / "out", SECONDS, RATE, max(4.0, SECONDS / 60), 1000)
        files = tmp_path / "out" / "events"
        begun = time.monotonic()
        while parts.generator.poll() is None:
            newest = max(files.glob("part-*.csv"))
            headers = {"Content-Type": "text/csv", "Accept": "text/csv"}
            request = urllib.request.Request(f"{parts.url}/score", newest.read_bytes(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert len(answer.read().split()) == RATE
            seen.append((time.monotonic() - begun, state_of_children()))
            time.sleep(EVERY_S)
        parts.trainers.wait(120)
    if OUT is not None:
        lines = [json.dumps({"seconds": at, **state}) for at, state in seen]
        Path(OUT).write_text("\n".join(lines) + "\n")
    assert len(seen) > 10
    quarter = len(seen) // 4
    before, after = (
        [state for _, state in part] for part in (seen[quarter : 2 * quarter], seen[-quarter:])
    )
    roles = set.union(*map(set, before))
    assert {"rank 0", "rank 1"} <= roles and len(roles) >= 4, roles
    for role in roles:
        earlier, later = (
            [state[role] for state in part if role in state] for part in (before, after)
        )
        assert later, role
        for name in ("descriptors", "threads"):
            least, least_later = (min(each[name] for each in part) for part in (earlier, later))
            assert least_later <= least + LARGER_COUNT, (role, name, least, least_later)
        most, most_later = (max(each["memory_mb"] for each in part) for part in (earlier, later))
        assert most_later <= LARGER * most + LARGER_MB, (role, most, most_later)


def state_of_children():
    """By role memory, descriptors and threads of all processes below this one."""
    states = {}
    below = {os.getpid()}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) not in below:
                continue
            below.add(int(folder.name))
            words = (folder / "cmdline").read_text().split("\0")
            name = (folder / "comm").read_text().strip()
            role = name if "python" not in name else " ".join(words[3:5])
            pages = int((folder / "statm").read_text().split()[1])
            states[role] = {
                "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                "descriptors": len(os.listdir(folder / "fd")),
                "threads": int(stat[17]),
            }
    return states
