"""Servers as processes, and ``wrk``, which asks them.

It is written in C and takes little of the cores that servers want.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.contender import CHECKOUT, BenchmarkError
from benchmarks.load import cpu_s
from pibroch.errors import MissingDependencyError

START_S = 120.0
END_S = 20.0
_LUA = """
local requests, next, sent = {{}}, 0, {{}}
function init(args)
  local file = io.open("{bodies}", "rb")
  for size in file:read("*l"):gmatch("%d+") do
    sent[#sent + 1] = file:read(tonumber(size))
  end
  for place, body in ipairs(sent) do
    requests[place] = wrk.format("POST", "{path}", {{["Content-Type"] = "application/json"}}, body)
  end
end
function request()
  next = next % #requests + 1
  return requests[next]
end
function done(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout + errors.status
  io.write(string.format("FOUND %d %d %d %d %d %d\\n",
    summary.requests, summary.duration, latency:percentile(50),
    latency:percentile(99), latency:percentile(99.9), failed))
end
"""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a few seconds of load gave.

    Attributes:
        requests: that were answered.
        seconds: that it took.
        p50_ms: time of an answer.
        p99_ms: of the slowest hundredth.
        p999_ms: of the slowest thousandth.
        failed: requests without an answer of status 200.
        server_cpu_s: of the server's processes.
    """

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    failed: int
    server_cpu_s: float


def find_wrk() -> str:
    """The generator.

    Raises:
        MissingDependencyError: when there is none.
    """
    path = shutil.which("wrk")
    if path is None:
        raise MissingDependencyError(
            "no `wrk`, which makes the load",
            "it on the PATH",
            "apt-get install wrk, or https://github.com/wg/wrk",
        )
    return path


class HttpServer:
    """A server as its own process, which says ``at http://...`` when it answers.

    Use as a context manager.
    """

    def __init__(
        self, label: str, command: Sequence[str], environment: dict[str, str] | None = None
    ) -> None:
        self.label = label
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the server
        variables = {
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "COLUMNS": "200",
            **(environment or {}),
        }
        self.process = subprocess.Popen(
            command, cwd=CHECKOUT, env=variables, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self.url = self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> str:
        deadline = time.monotonic() + START_S
        while True:
            text = self._text()
            if match := re.search(r"at (http://\S+:\d+)\s", text):
                return match[1]
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(
                    f"{self.label} did not start: {text[-2000:]}", "a server that answers"
                )
            time.sleep(0.05)

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def pids(self) -> list[int]:
        """Its process and those that it started."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return cpu_s(self.pids())


def serve_command(path: Path, *options: object) -> list[str]:
    """``pibroch serve`` at any free port."""
    return [sys.executable, "-m", "pibroch", "serve", str(path), "--port", "0", *map(str, options)]


def plain_server(label: str, python: Path, folder: Path, kind: str) -> HttpServer:
    """One of the peers, with OpenMP's threads tuned as ours.

    FastAPI comes from this environment where the peer's own has none.
    """
    script = CHECKOUT / "benchmarks" / "workers" / "http_plain.py"
    site = sysconfig.get_paths()["purelib"]
    return HttpServer(
        label,
        [str(python), str(script), str(folder), kind],
        {"PIBROCH_BENCH_SITE": site, "GOMP_SPINCOUNT": "10000"},
    )


def run_load(
    server: HttpServer,
    bodies: Sequence[bytes],
    connections: int,
    seconds: float,
    path: str = "/score",
    launcher: Sequence[str] = (),
) -> LoadResult:
    """Keep so many connections busy with requests, each with one request at a time.

    Args:
        server: that is asked.
        bodies: of the requests, in turn.
        connections: how many.
        seconds: how long.
        path: of the requests.
        launcher: what to put before the generator, so that it runs on another host.

    Raises:
        MissingDependencyError: without ``wrk``.
        BenchmarkError: when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "bodies"
        script = Path(folder) / "load.lua"
        packed.write_bytes(
            " ".join(str(len(body)) for body in bodies).encode() + b"\n" + b"".join(bodies)
        )
        script.write_text(_LUA.format(bodies=packed, path=path))
        command = [
            *launcher,
            find_wrk(),
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--timeout",
            "60s",
            "-s",
            str(script),
            server.url,
        ]
        before = server.cpu_s()
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 120, check=False
        )
        cpu = server.cpu_s() - before
    match = re.search(r"FOUND (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)", ran.stdout)
    if ran.returncode or match is None:
        raise BenchmarkError(f"wrk failed: {ran.stdout[-500:]}{ran.stderr[-1000:]}", "a load")
    requests, micros, p50, p99, p999, failed = map(int, match.groups())
    return LoadResult(requests, micros / 1e6, p50 / 1e3, p99 / 1e3, p999 / 1e3, failed, cpu)
