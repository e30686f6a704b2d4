"""What it costs to publish versions while a run trains, and how soon servers answer with them.

Two ranks train, two servers follow, both servers are asked all the time. Correctness first: the
rows and dense layers of each version that a server answered with are, to the bit, those of a
checkpoint that the same run, without publishing, saves at that step.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from benchmarks.contender import BenchmarkError
from benchmarks.deaths import WatchedRun
from benchmarks.environments import our_python
from benchmarks.http_load import HttpServer, serve_command
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.small_runs import RECIPE, settings
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.serve.export import ExportOptions, export_checkpoint
from pibroch.serve.from_delta import open_exported
from pibroch.serve.predictor import Predictor
from pibroch.serve.row_files import MappedRows
from pibroch.state.delta_format import is_delta, read_delta
from pibroch.state.export_format import read_export

WITHOUT = "without"
ALONE = "publishing"
FOLLOWED = "publishing, servers follow"
MOST_CHECKED = {True: 3, False: 40}
"""Versions that are compared with checkpoints, in a quick run and in full."""
EVERY_S = 2.0
ASKED_EVERY_S = 0.02
WARM_STEPS = 20
RawRow = dict[str, str | None]
COLUMNS = [
    "rows",
    "contender",
    "samples_per_second",
    "of_without",
    "cpu_ms_a_step",
    "servers_cpu",
    "versions",
    "freshness_p50",
    "freshness_most",
]
PLOT = PlotSpec("samples_per_second", ("rows",), "contender", "contender", "samples/s")


@topic(
    "publishing",
    "what publishing costs the run that trains, and how soon servers answer with its versions",
)
def run(options: Options) -> Report:
    """Measure runs in turn, without and with."""
    table_rows, seconds, rounds = (3_850, 10.0, 1) if options.quick else (38_500, 20.0, 6)
    label = f"{26 * table_rows / 1e6:.1f} M"
    data = options.scratch / "data"
    synthesize(SyntheticOptions(num_samples=400_000, table_rows=table_rows), data)
    recipe = options.scratch / "recipe.toml"
    recipe.write_text(RECIPE)
    case = _Case(recipe, data, options)
    case.make_first_version()
    measured: dict[str, list[_Measured]] = {WITHOUT: [], ALONE: [], FOLLOWED: []}
    clients: list[_Client] = []
    for number in range(rounds):
        for name in measured:
            options.say(f"{label} rows, {name}, round {number + 1}")
            one, asked = case.measure(name, number, seconds)
            measured[name].append(one)
            if name == FOLLOWED:
                clients += asked
    waits = [wait for client in clients for wait in client.waits()]
    options.say("each version beside a checkpoint of its step")
    num_same = case.check(clients, MOST_CHECKED[options.quick])
    ratios = {
        name: statistics.median(
            one.rate / other.rate for other, one in zip(measured[WITHOUT], values, strict=True)
        )
        for name, values in measured.items()
    }
    rows: list[Row] = [
        {
            "rows": label,
            "contender": name,
            "samples_per_second": 2048 * statistics.median(each.rate for each in values),
            "of_without": ratios[name],
            "cpu_ms_a_step": statistics.median(each.cpu_ms_a_step for each in values),
            "servers_cpu": statistics.median(each.servers_cpu for each in values),
        }
        for name, values in measured.items()
    ]
    rows[-1] |= {
        "versions": num_same,
        "freshness_p50": statistics.median(waits),
        "freshness_most": max(waits),
    }
    notes = [
        f"**{label} rows: {ratios[ALONE]:.3f} of the throughput, {ratios[FOLLOWED]:.3f} where two"
        f" servers on the same cores open each version; one is answered with"
        f" {statistics.median(waits):.2f} s after its step (median)**",
        f"two ranks, alltoall, batch 2048, dim 16, a version every {EVERY_S:g} s; two servers and"
        f" two clients, one request of 24 rows every {1000 * ASKED_EVERY_S:g} ms each, on the same"
        " cores; but for the last line they serve an older version all the time",
        f"`versions`: {num_same} that a server answered with, each with the rows and dense layers"
        " of a checkpoint of its step to the bit",
        "`cpu_ms_a_step`: of the run's processes; `servers_cpu`: of both servers, as a share of one"
        " core",
        "`freshness`: seconds from the end of the step to the first answer, by server and version",
    ]
    return Report(
        "publishing", "Publishing while training", rows, COLUMNS, PLOT, notes, provenance()
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of one run.

    Attributes:
        rate: steps a second.
        cpu_ms_a_step: of the run's processes.
        servers_cpu: of both servers, cores.
    """

    rate: float
    cpu_ms_a_step: float
    servers_cpu: float


@dataclass(slots=True)
class _Client:
    """Asks a server all the time, and remembers the first answer of each version."""

    url: str
    body: bytes
    first: dict[str, tuple[float, list[float]]] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """On a thread of its own."""
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when the last answer has come."""
        assert self._thread is not None, "started before"
        self._ends.set()
        self._thread.join(30)

    def _ask(self) -> None:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
        while not self._ends.wait(ASKED_EVERY_S):
            connection.request("POST", "/score", self.body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = json.loads(response.read())
            if response.status != 200:
                raise BenchmarkError(f"{self.url}: {response.status} {content}")
            version = content["model_version"]
            before = self.first.setdefault(version, (time.time(), content["scores"]))
            if before[1] != content["scores"]:
                raise BenchmarkError(f"two answers of version {version} that differ")

    def waits(self) -> list[float]:
        """Of each version whose step's end is known: seconds to the first answer."""
        return [
            self.first[version][0] - ended
            for version, ended in self.published.items()
            if version in self.first
        ]


class _Case:
    """Runs of one recipe, servers, and requests.

    Args:
        recipe: of all runs.
        data: of all runs.
        options: where things lie, and who is told.
    """

    def __init__(self, recipe: Path, data: Path, options: Options) -> None:
        self._recipe = recipe
        self._data = data
        self._scratch = options.scratch
        self._start = options.scratch / "start"
        self.rows: list[RawRow] = []

    def command(self, run: Path, *given: str) -> list[str]:
        """Of a run of two ranks."""
        how = ["train.checkpoint_every=1000000", *given]
        arguments = ["--data", str(self._data), "--run-dir", str(run), "--ranks", "2"]
        train = [str(our_python()), "-m", "pibroch", "train", str(self._recipe)]
        return [*train, *arguments, *settings(*how)]

    def make_first_version(self) -> None:
        """What servers of a run that publishes nothing answer with."""
        first = [f"train.publish_to={self._start}", "train.steps=1"]
        _finish(self.command(self._scratch / "first", *first))
        predictor = Predictor.open(self._start / "1")
        self.rows = [
            {name: str((7 * place + 3 * at) % 50) for at, name in enumerate(predictor.columns)}
            for place in range(24)
        ]

    def measure(self, name: str, number: int, seconds: float) -> tuple[_Measured, list[_Client]]:
        """A run, and what the servers answered."""
        folder = self._scratch / f"run-{len(name)}-{number}"
        models = self._scratch / f"models-{folder.name}"
        more = ["train.steps=1000000", "train.log_every=1"]
        if name != WITHOUT:
            more += [
                f"train.publish_to={models}",
                f"train.publish_every_seconds={EVERY_S}",
                "train.publish_keep_seconds=100000",
            ]
        body = json.dumps({"rows": self.rows}).encode()
        with WatchedRun(folder, self.command(folder, *more), goes_on_by_itself=True) as watched:
            served = models if name == FOLLOWED else self._start
            watched.wait_for(lambda: (served / "1" / "export.json").exists())
            servers = [
                HttpServer(f"{name} {each}", serve_command(served, "--reload-every", "0.2"))
                for each in range(2)
            ]
            clients = [_Client(server.url, body) for server in servers]
            try:
                for client in clients:
                    client.start()
                begin = watched.step()
                watched.wait_for(lambda: watched.step() >= begin + WARM_STEPS)
                begin, run_s = watched.step(), -watched.cpu_s()
                servers_s = -sum(server.cpu_s() for server in servers)
                rate = watched.rate(seconds)
                num_steps, run_s = watched.step() - begin, run_s + watched.cpu_s()
                servers_s += sum(server.cpu_s() for server in servers)
            finally:
                for client in clients:
                    client.end()
                for server in servers:
                    server.close()
        if name == FOLLOWED:
            ended = {
                manifest.version: manifest.time
                for path in models.iterdir()
                if path.name.isdecimal() and is_delta(path)
                for manifest in [read_delta(path)[0]]
                if manifest.time is not None
            }
            for client in clients:
                client.published = ended
        return _Measured(rate, 1e3 * run_s / num_steps, servers_s / seconds), clients

    def check(self, clients: list[_Client], most: int) -> int:
        """Compare versions that were answered with checkpoints of their steps.

        Rows and dense layers to the bit; scores as threads round them.
        """
        answered: dict[str, list[list[float]]] = {}
        for client in clients:
            for version, (_, scores) in client.first.items():
                answered.setdefault(version, []).append(scores)
        folders = {
            _version_of(path): path
            for models in self._scratch.glob("models-*")
            for path in models.iterdir()
            if path.name.isdecimal()
        }
        steps = {version: int(version.partition("-")[0]) for version in answered}
        checked = sorted(steps, key=steps.__getitem__)[:most]
        for version in checked:
            step = steps[version]
            run = self._scratch / "again"
            more = [f"train.steps={step}", "train.keep=1"]
            _finish([*self.command(run, *more), "--resume"])
            whole = self._scratch / "whole"
            export_checkpoint(
                run / "checkpoints" / f"step-{step:08d}", whole, ExportOptions(overwrite=True)
            )
            if not _are_equal(folders[version], whole):
                raise BenchmarkError(f"version {version} that is not the checkpoint's")
            expected = Predictor.open(whole).score_raw(self.rows).numpy()
            for scores in answered[version]:
                if abs(np.array(scores) - expected).max() > 1e-6:
                    raise BenchmarkError(f"scores of version {version} that are not its own")
        return len(checked)


def _are_equal(one: Path, other: Path) -> bool:
    """Whether all rows and dense layers of two exports or deltas are the same to the bit."""
    versions = [open_exported(path) for path in (one, other)]
    rows = [each.lookup for each in versions]
    assert isinstance(rows[0], MappedRows) and isinstance(rows[1], MappedRows), "of exports"
    everything = np.arange(rows[0].num_rows)
    states = [each.dense.state_dict() for each in versions]
    return np.array_equal(rows[0].stored(everything), rows[1].stored(everything)) and all(
        torch.equal(states[0][name], states[1][name]) for name in states[1]
    )


def _version_of(folder: Path) -> str:
    return read_delta(folder)[0].version if is_delta(folder) else read_export(folder).version


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise BenchmarkError(done.stderr[-2000:])
