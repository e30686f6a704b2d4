"""The newest figures of a run over HTTP, in Prometheus' text format: ``GET /metrics``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pibroch.errors import ConfigError
from pibroch.observability.records import EvaluationRecord, TrainingRecord, WindowRecord

_FIGURES = ("auc", "logloss", "normalized_entropy", "calibration", "num_samples")
_TRAINING = ("step", "loss", "samples_per_second", "learning_rate", "rss_bytes", "event_time")
_TIMEOUT_S = 5.0
_ALARMS = "pibroch_run_alarms_total"


class Exposition:
    """Answers whoever asks, on threads of its own, until it is closed.

    Args:
        address: ``HOST:PORT`` to listen at; port 0 for any that is free.

    Attributes:
        url: where it answers.

    Raises:
        ConfigError: for an address at which it cannot listen.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        exposition = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                is_there = self.path == "/metrics"
                text = exposition.text().encode() if is_there else b"need /metrics\n"
                self.send_response(200 if is_there else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *_: object) -> None:
                """Say nothing."""

        try:
            self._server = ThreadingHTTPServer((host, int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--metrics-address {address}: {getattr(error, 'strerror', None) or error}",
                "HOST:PORT of this machine that is free",
                "choose another port, or 0 for any",
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._values: dict[str, float] = {_ALARMS: 0}
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="pibroch-metrics", daemon=True
        )
        self._thread.start()

    def text(self) -> str:
        """All that is known now."""
        with self._lock:
            values = dict(self._values)
        lines: list[str] = []
        for name, value in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            about = f"# TYPE {name.partition('{')[0]} {kind}"
            lines += [] if about in lines else [about]
            lines.append(f"{name} {value:.15g}")
        return "\n".join(lines) + "\n"

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        self._set({f"pibroch_run_{name}": getattr(record, name) for name in _TRAINING})

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        split = f'split="{record.split}",'
        self._set(dict(_by_label("pibroch_run_evaluation", record.tasks, split)))

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        figures = dict(_by_label("pibroch_run_window", record.tasks))
        figures["pibroch_run_window_end_ms"] = record.end_ms
        figures["pibroch_run_late_total"] = record.num_late
        figures[_ALARMS] = self._values[_ALARMS] + len(record.alarms)
        self._set(figures)

    def close(self) -> None:
        """See `Sink`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)

    def _set(self, figures: Mapping[str, float | None]) -> None:
        """Take the newest figures; what is undefined now is left out."""
        with self._lock:
            for name, value in figures.items():
                if value is None:
                    self._values.pop(name, None)
                else:
                    self._values[name] = value


def _by_label(
    prefix: str, tasks: Mapping[str, Mapping[str, float | None]], labels: str = ""
) -> Iterator[tuple[str, float | None]]:
    """Figures of all labels under names that Prometheus takes."""
    for name in _FIGURES:
        for label, figures in tasks.items():
            if name in figures:
                shown = label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                yield f'{prefix}_{name}{{{labels}label="{shown}"}}', figures[name]
