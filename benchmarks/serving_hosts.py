"""Half of a model's tables on each of two hosts of the lab, beside all of them on one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

import numpy as np

from benchmarks.contender import BenchmarkError
from benchmarks.http_load import HttpServer, LoadResult, run_load, serve_command
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.registry import Options
from benchmarks.results import Report, Row
from benchmarks.serving_case import make_case
from pibroch.wire.secret import SECRET_VARIABLE, new_secret

RATES = ("1gbit", "200mbit")
QUICK_RATES = ("1gbit",)
ROWS = (1, 8, 64, 512)
CONNECTIONS = (1, 8, 32)
QUICK_ROWS = (1, 64)
QUICK_CONNECTIONS = (1, 8)
CLIENT = 0
FIRST = 1
SECOND = 2
WHOLE_PORT = 8001
PART_PORT = 8002
ROWS_PORT = 8003
BODIES = 64
BOUND = 1.5
ONE = "one host"
TWO = "two hosts"


def hosts(options: Options, load: ForeignLoad) -> Report:
    """Times of answers with tables on two hosts, over those with all on one, in turns.

    A third host asks. Raises what :meth:`benchmarks.lab.network.Network.build` raises where no lab
    can be made.
    """
    options.say("a model")
    case = make_case(
        options.scratch / options.section, *((8000, 3000) if options.quick else (60_000, 20_000))
    )
    rounds, seconds = (2, 1.0) if options.quick else (3, 2.0)
    sizes, loads = (QUICK_ROWS, QUICK_CONNECTIONS) if options.quick else (ROWS, CONNECTIONS)
    rows: list[Row] = []
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(3, rate=RATES[0]))
        client = lab.launcher(CLIENT)
        places = [f"{lab.network.address(host)}:{ROWS_PORT}" for host in (FIRST, SECOND)]
        at = [option for each in places for option in ("--rows-at", each)]
        at += ["--rows-port", str(ROWS_PORT)]
        environment = {SECRET_VARIABLE: new_secret()}

        def server(label: str, host: int, port: int, *more: object) -> HttpServer:
            command = serve_command(
                case.int8, "--host", lab.network.address(host), "--port", port, *more
            )
            return stack.enter_context(
                HttpServer(label, [*lab.launcher(host), *command], environment)
            )

        one = server(ONE, FIRST, WHOLE_PORT)
        other = server("second half", SECOND, PART_PORT, "--part", "2/2", *at)
        two = server(TWO, FIRST, PART_PORT, "--part", "1/2", *at)
        for each in (one, other, two):
            load.add_worker(each.process.pid)
        for rate in QUICK_RATES if options.quick else RATES:
            lab.network.shape(rate)
            for size in sizes:
                bodies = [case.body(number, size) for number in range(BODIES)]
                for connections in loads:
                    options.say(f"{rate}, {size} rows, {connections} connections")
                    results = _in_turns((one, two), bodies, connections, rounds, seconds, client)
                    rows += _rows_of(results, rate, size, connections)
    failed = sum(int(row["failed"]) for row in rows)
    if failed:
        raise BenchmarkError(f"{failed} requests without an answer", "an answer to each")
    notes = [
        (
            "one host has all rows (int8), or each of two has half and fetches the others' from the"
            " other; a third host asks; all share this machine's cores, so that the second host's"
            " work for the first takes time from it here"
        ),
        (
            "`over_one_host`: p50 over that of one host, round by round, the median; the bar at"
            f" 1gbit is {BOUND}; every request is answered"
        ),
    ]
    columns = [
        "rate",
        "rows",
        "connections",
        "contender",
        "requests_per_second",
        "p50_ms",
        "p99_ms",
        "over_one_host",
    ]
    plot = PlotSpec(
        "over_one_host",
        ("rate", "rows"),
        "connections",
        "contender",
        "p50 over one host's",
        decimals=2,
        ours=TWO,
    )
    return Report("serving", "Serving: tables over two hosts", rows, columns, plot, notes)


def _in_turns(
    servers: Sequence[HttpServer],
    bodies: Sequence[bytes],
    connections: int,
    rounds: int,
    seconds: float,
    launcher: Sequence[str],
) -> dict[str, list[LoadResult]]:
    results: dict[str, list[LoadResult]] = {server.label: [] for server in servers}
    for server in servers:
        run_load(server, bodies, connections, 1.0, launcher=launcher)
    for _ in range(rounds):
        for server in servers:
            results[server.label].append(
                run_load(server, bodies, connections, seconds, launcher=launcher)
            )
    return results


def _rows_of(
    results: dict[str, list[LoadResult]], rate: str, size: int, connections: int
) -> list[Row]:
    rows: list[Row] = []
    for label, turns in results.items():
        ratios = [two.p50_ms / one.p50_ms for two, one in zip(turns, results[ONE], strict=True)]
        rows.append(
            {
                "rate": rate,
                "rows": size,
                "connections": connections,
                "contender": label,
                "requests_per_second": median(turn.requests / turn.seconds for turn in turns),
                "p50_ms": median(turn.p50_ms for turn in turns),
                "p99_ms": median(turn.p99_ms for turn in turns),
                "over_one_host": float(np.median(ratios)),
                "least_over_one_host": min(ratios),
                "most_over_one_host": max(ratios),
                "failed": sum(turn.failed for turn in turns),
            }
        )
    return rows
