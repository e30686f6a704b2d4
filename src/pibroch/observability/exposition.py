"""The newest figures of a run over HTTP, in Prometheus' text format: ``GET /metrics``.

Whoever reaches the port may connect, beside a run that may not be disturbed: the HTTP server is
that of :mod:`pibroch.serve`, with its bounds on connections, their time and their bytes, on one
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pibroch.errors import ConfigError, MissingDependencyError
from pibroch.observability.records import EvaluationRecord, TrainingRecord, WindowRecord

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from pibroch.serve.endpoints import Reply, Request

_FIGURES = ("auc", "logloss", "normalized_entropy", "calibration", "num_samples")
_TRAINING = ("step", "loss", "samples_per_second", "learning_rate", "rss_bytes", "event_time")
_CONNECTIONS = 64
"""At once; few scrape a run."""
_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
Labels = tuple[tuple[str, str], ...]


class Exposition:
    """Answers whoever asks, on a thread of its own, until it is closed.

    Args:
        address: ``HOST:PORT`` to listen at; port 0 for any that is free.

    Attributes:
        url: where it answers.

    Raises:
        ConfigError: for an address at which it cannot listen.
        MissingDependencyError: without prometheus-client, uvicorn or httptools.
    """

    def __init__(self, address: str) -> None:
        for module in ("prometheus_client", "uvicorn", "httptools"):
            if find_spec(module) is None:
                raise MissingDependencyError(
                    f"--metrics-address without {module}",
                    "the extra `serve`",
                    "pip install 'pibroch[serve]'",
                )
        from pibroch.serve.endpoints import GET, Endpoint
        from pibroch.serve.listening import BackgroundServer, bound_socket, url_at
        from pibroch.serve.settings import ServerLimits

        self._gauges: dict[str, dict[Labels, float]] = {}
        self._counters = {"late": 0, "ahead": 0, "alarms": 0}
        self._lock = threading.Lock()
        host, _, port = address.rpartition(":")
        try:
            bound = bound_socket(host.strip("[]"), int(port))
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--metrics-address {address}: {getattr(error, 'strerror', None) or error}",
                "HOST:PORT of this machine that is free",
                "choose another port, or 0 for any",
            ) from error
        self.url = f"{url_at(bound)}/metrics"
        endpoint = Endpoint(GET, "/metrics", self._answer)
        limits = ServerLimits(connections=_CONNECTIONS)
        self._server = BackgroundServer({endpoint.path: endpoint}, bound, limits)

    def collect(self) -> Iterator[Metric]:
        """All that is known now; called by who asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            gauges = {name: dict(values) for name, values in self._gauges.items()}
            counters = dict(self._counters)
        for name, values in gauges.items():
            keys = [key for key, _ in next(iter(values))]
            family = GaugeMetricFamily(f"pibroch_run_{name}", "Of a run.", labels=keys)
            for labels, value in values.items():
                family.add_metric([each for _, each in labels], value)
            yield family
        for name, count in counters.items():
            yield CounterMetricFamily(f"pibroch_run_{name}", "Of a run so far.", value=count)

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        for name in _TRAINING:
            self._set(name, {(): getattr(record, name)})

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        self._set_all("evaluation", record.tasks, (("split", record.split),))

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        self._set_all("window", record.tasks, ())
        self._set("window_end_ms", {(): record.end_ms})
        with self._lock:
            self._counters["late"] = record.num_late
            self._counters["ahead"] = record.num_ahead
            self._counters["alarms"] += len(record.alarms)

    def close(self) -> None:
        """See `Sink`."""
        self._server.close()

    async def _answer(self, _: Request) -> Reply:
        from prometheus_client import CollectorRegistry, generate_latest

        from pibroch.serve.endpoints import Reply

        registry = CollectorRegistry()
        registry.register(self)
        return Reply(generate_latest(registry), (_TYPE,))

    def _set_all(
        self, kind: str, tasks: Mapping[str, Mapping[str, float | None]], labels: Labels
    ) -> None:
        for name in _FIGURES:
            of_label = {
                (*labels, ("label", label)): figures[name]
                for label, figures in tasks.items()
                if name in figures
            }
            self._set(f"{kind}_{name}", of_label)

    def _set(self, name: str, values: Mapping[Labels, float | None]) -> None:
        """Take the newest figures; what is undefined now is left out."""
        known = {labels: value for labels, value in values.items() if value is not None}
        with self._lock:
            if known:
                self._gauges[name] = known
            else:
                self._gauges.pop(name, None)
