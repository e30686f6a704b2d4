"""Answers over HTTP: raw rows to scores, their freshness, and several workers' memory.

Beside the same model behind plain FastAPI, with torch's tables and with TorchRec's quantised ones.
All servers are one process (but for the memory of workers), asked over loopback by ``wrk`` with the
same JSON bodies. It has a share of the machine's cores, as little as a generator in C can do with;
servers have the rest.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np

from benchmarks.comparison import OURS, noise_note
from benchmarks.contender import BenchmarkError
from benchmarks.environments import peers_python
from benchmarks.http_load import HttpServer, find_wrk, plain_server, run_load, serve_command
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.serving_case import ServingCase, make_case
from benchmarks.serving_hosts import hosts
from pibroch.errors import MissingDependencyError

SECTIONS = ("requests", "freshness", "memory", "hosts")
FASTAPI = "FastAPI + torch"
TORCHREC = "FastAPI + TorchRec int8"
BODIES = 64
ROWS = (1, 8, 64, 512)
CONNECTIONS = (1, 8, 32)
QUICK_ROWS = (1, 64)
QUICK_CONNECTIONS = (8,)
NUM_RELOADS = 10
NUM_DELTAS = 20
NUM_WORKERS = 4
MB_PER_WORKER = 250
TABLES_FACTOR = 1.1


@topic(
    "serving",
    "requests/s and latency over HTTP beside FastAPI with torch and with TorchRec; freshness;"
    " memory; hosts. Needs `wrk`",
    sections=SECTIONS,
    quick_sections=SECTIONS,
)
def run(options: Options) -> Report:
    """Measure a section."""
    find_wrk()
    load = ForeignLoad()
    report = {"requests": requests, "freshness": freshness, "memory": memory, "hosts": hosts}[
        options.section
    ](options, load)
    report.notes.append(noise_note(load))
    report.origin = provenance()
    return report


def requests(options: Options, load: ForeignLoad) -> Report:
    """Requests a second and times of answers, by rows of a request and by connections.

    Contenders take turns.
    """
    options.say("a model")
    case = make_case(
        options.scratch / options.section, *((8000, 3000) if options.quick else (60_000, 20_000))
    )
    rounds, seconds = (2, 2.0) if options.quick else (4, 3.0)
    sizes, loads = (QUICK_ROWS, QUICK_CONNECTIONS) if options.quick else (ROWS, CONNECTIONS)
    rows: list[Row] = []
    with ExitStack() as stack:
        servers, notes = _contenders(case, stack)
        for server in servers:
            load.add_worker(server.process.pid)
            _check_scores(server, case)
        for size in sizes:
            bodies = [case.body(number, size) for number in range(BODIES)]
            for connections in loads:
                for server in servers:
                    run_load(server, bodies, connections, 0.5)
                rows_by_label: dict[str, list[Row]] = {server.label: [] for server in servers}
                for turn in range(rounds):
                    for server in servers:
                        options.say(
                            f"{size} rows, {connections} connections, {server.label}, round"
                            f" {turn + 1}"
                        )
                        rows_by_label[server.label].append(
                            _measured(server, bodies, connections, seconds)
                        )
                rows += _rows_of(rows_by_label, size, connections)
    notes += [
        (
            "the same JSON of raw rows for all (13 numbers, 26 texts a row), whose scores were"
            " first shown to agree (float32: 1e-5, int8: 0.02); each connection awaits its answer,"
            " so times are those at full load"
        ),
        (
            "`over_fastapi`: requests/s over those of FastAPI + torch, round by round, the median;"
            " FastAPI's servers look values up in dictionaries and compute up to 32 rows with one"
            " thread; torch has tables of float32, the others of int8"
        ),
    ]
    columns = [
        "rows", "connections", "contender", "requests_per_second", "p50_ms", "p99_ms", "p999_ms",
        "cpu_us_per_request", "over_fastapi", "failed",
    ]  # fmt: skip
    plot = PlotSpec(
        "over_fastapi",
        ("rows",),
        "connections",
        "contender",
        "requests/s over FastAPI + torch",
        decimals=1,
        ours=OURS,
    )
    return Report("serving", "Serving: requests", rows, columns, plot, notes)


def _contenders(case: ServingCase, stack: ExitStack) -> tuple[list[HttpServer], list[str]]:
    servers = [
        stack.enter_context(HttpServer(OURS, serve_command(case.int8))),
        stack.enter_context(plain_server(FASTAPI, Path(sys.executable), case.float32, "torch")),
    ]
    try:
        servers.append(
            stack.enter_context(plain_server(TORCHREC, peers_python(), case.float32, "torchrec"))
        )
    except (MissingDependencyError, BenchmarkError) as missing:
        return servers, [f"**{TORCHREC} left out**: {missing}"]
    return servers, []


def ask(url: str, body: bytes, path: str = "/score") -> dict[str, object]:
    """An answer in JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise BenchmarkError(f"{response.status}: {content[:300]!r}", "an answer")
        answer: dict[str, object] = json.loads(content)
        return answer
    finally:
        connection.close()


def _check_scores(server: HttpServer, case: ServingCase) -> None:
    scores = np.array(ask(server.url, case.body(0, 512))["scores"])
    bound = 1e-5 if server.label == FASTAPI else 0.02
    worst = float(np.abs(scores - np.array(case.scores[:512])).max())
    if worst > bound:
        raise BenchmarkError(
            f"scores of {server.label} that are off by {worst:.2g}", f"at most {bound:g}"
        )


def _measured(server: HttpServer, bodies: Sequence[bytes], connections: int, seconds: float) -> Row:
    result = run_load(server, bodies, connections, seconds)
    return {
        "requests_per_second": result.requests / result.seconds,
        "p50_ms": result.p50_ms,
        "p99_ms": result.p99_ms,
        "p999_ms": result.p999_ms,
        "cpu_us_per_request": 1e6 * result.server_cpu_s / max(1, result.requests),
        "failed": result.failed,
    }


def _rows_of(rows_by_label: dict[str, list[Row]], size: int, connections: int) -> list[Row]:
    rows: list[Row] = []
    for label, turns in rows_by_label.items():
        row: Row = {"rows": size, "connections": connections, "contender": label}
        for name in turns[0]:
            values = [turn[name] for turn in turns]
            row[name] = sum(values) if name == "failed" else median(values)
        ratios = [
            ours["requests_per_second"] / other["requests_per_second"]
            for ours, other in zip(turns, rows_by_label[FASTAPI], strict=True)
        ]
        row |= {
            "over_fastapi": median(ratios),
            "least_over_fastapi": min(ratios),
            "most_over_fastapi": max(ratios),
        }
        rows.append(row)
    return rows


def freshness(options: Options, load: ForeignLoad) -> Report:
    """Reloads and deltas under half of the load that the server can bear.

    Seconds from an export's end to its first answer.
    """
    reloads, deltas = (2, 4) if options.quick else (NUM_RELOADS, NUM_DELTAS)
    seconds = 15.0 if options.quick else 60.0
    options.say("a model")
    total = reloads + deltas
    size = (8000, 3000) if options.quick else (60_000, 20_000)
    case = make_case(
        options.scratch / options.section, *size, steps=2 * (total + 1), checkpoint_every=2
    )
    models = options.scratch / options.section / "models"
    models.mkdir()
    case.int8.rename(models / "1")
    bodies = [case.body(number, 1) for number in range(BODIES)]
    rows: list[Row] = []
    with HttpServer(OURS, serve_command(models)) as server:
        load.add_worker(server.process.pid)
        options.say("what it can bear")
        most = run_load(server, bodies, 8, 3.0)
        connections = 4  # of the eight that keep it busy
        with BackgroundLoad(server, bodies, connections, seconds + 30) as running:
            begun = time.monotonic()
            whole = 1
            for number in range(total):
                kind = "whole" if number % (total // reloads) == total // reloads - 1 else "delta"
                options.say(f"{kind} {number + 1} of {total}")
                out = models / str(number + 2)
                command = [
                    sys.executable,
                    "-m",
                    "pibroch",
                    "export",
                    str(case.checkpoints[number + 1]),
                    "--out",
                    str(out),
                ]
                command += (
                    ["--dtype", "int8"]
                    if kind == "whole"
                    else ["--since", str(models / str(whole))]
                )
                started = time.monotonic()
                before = ask(server.url, bodies[0])["model_version"]
                exporting = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                while ask(server.url, bodies[0])["model_version"] == before:
                    if exporting.poll() or time.monotonic() - started > 120:
                        raise BenchmarkError(
                            f"an export that was not served: {command}", "a new version"
                        )
                    time.sleep(0.005)
                seen = time.time()
                fresh = seen - out.stat().st_ctime  # when it was given its name
                exporting.wait(60)
                taken = time.monotonic() - started
                rows.append(
                    {"kind": kind, "number": number + 1, "export_s": taken, "fresh_s": fresh}
                )
                whole = number + 2 if kind == "whole" else whole
                time.sleep(max(0.0, begun + seconds * (number + 1) / total - time.monotonic()))
            lost = running.finish()
    summary: list[Row] = []
    for kind in ("delta", "whole"):
        times = [row["fresh_s"] for row in rows if row["kind"] == kind]
        exports = [row["export_s"] for row in rows if row["kind"] == kind]
        summary.append(
            {
                "kind": kind,
                "contender": OURS,
                "number": len(times),
                "fresh_p50_s": median(times),
                "fresh_most_s": max(times),
                "export_command_p50_s": median(exports),
            }
        )
    notes = [
        (
            f"{reloads} whole exports and {deltas} deltas in {seconds:g} s; {connections}"
            f" connections always busy (8 reach {most.requests / most.seconds:,.0f} requests/s);"
            f" {lost[0]:,} requests were answered, **{lost[1]} failed**"
        ),
        (
            "`fresh`: from the moment when a whole export or delta takes its name, which is the"
            " last that `pibroch export` does, to the first answer of that version; the server"
            " looks each second"
        ),
    ]
    columns = ["kind", "number", "fresh_p50_s", "fresh_most_s", "export_command_p50_s"]
    plot = PlotSpec(
        "fresh_p50_s",
        ("contender",),
        "kind",
        "contender",
        "s from export to answer",
        decimals=2,
        ours=OURS,
    )
    return Report("serving", "Serving: freshness", summary, columns, plot, notes)


class BackgroundLoad:
    """Load that goes on beside what is measured, in pieces of a second so that it can end."""

    def __init__(
        self, server: HttpServer, bodies: Sequence[bytes], connections: int, seconds: float
    ) -> None:
        self._arguments = (server, bodies, connections, 1.0)
        self._stop = threading.Event()
        self._answered = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BackgroundLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _run(self) -> None:
        while not self._stop.is_set():
            result = run_load(*self._arguments)
            self._answered += result.requests
            self._failed += result.failed

    def finish(self) -> tuple[int, int]:
        """End it: requests that were answered, and those that were not."""
        self._stop.set()
        self._thread.join()
        return self._answered, self._failed


def memory(options: Options, load: ForeignLoad) -> Report:
    """Four workers at one port: all that they take, tables once."""
    options.say("a model")
    case = make_case(
        options.scratch / options.section, *((8000, 3000) if options.quick else (400_000, 100_000))
    )
    tables = sum(path.stat().st_size for path in (case.float32 / "tables").iterdir())
    bodies = [case.body(number, 64) for number in range(BODIES)]
    with HttpServer(OURS, serve_command(case.float32, "--workers", NUM_WORKERS)) as server:
        load.add_worker(server.process.pid)
        options.say("load")
        run_load(server, bodies, 32, 3.0)
        shared = [_proportional_bytes(pid) for pid in server.pids()]
    bound = TABLES_FACTOR * tables + MB_PER_WORKER * 1e6 * NUM_WORKERS
    rows: list[Row] = [
        {
            "workers": NUM_WORKERS,
            "contender": OURS,
            "tables_mb": tables / 1e6,
            "all_mb": sum(shared) / 1e6,
            "bound_mb": bound / 1e6,
            "largest_process_mb": max(shared) / 1e6,
        }
    ]
    notes = [
        (
            "`all_mb`: proportional set size of the workers and of what started them, after load:"
            " shared pages counted once"
        ),
        f"the bound: {TABLES_FACTOR} of the tables (float32) and {MB_PER_WORKER} MB a worker",
    ]
    columns = ["workers", "tables_mb", "all_mb", "bound_mb", "largest_process_mb"]
    plot = PlotSpec("all_mb", ("contender",), "workers", "contender", "MB", decimals=0, ours=OURS)
    return Report("serving", "Serving: memory of workers", rows, columns, plot, notes)


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
