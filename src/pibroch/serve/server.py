"""A server in this process: uvicorn around the service, from load to the last answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn

try:
    import resource
except ImportError:  # not on every system
    resource = None  # type: ignore[assignment]

from pibroch.errors import ConfigError
from pibroch.process import give_way
from pibroch.rpc.rows import RowWorker
from pibroch.serve import row_service
from pibroch.serve.admission import AdmissionControl
from pibroch.serve.batcher import Batcher
from pibroch.serve.http import Service, build_endpoints
from pibroch.serve.listening import bound_socket, url_at, uvicorn_config
from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.row_hosts import RowAccess
from pibroch.serve.settings import ServerLimits
from pibroch.serve.store import ModelStore

logger = logging.getLogger(__name__)
_POLL_S = 0.02
_BEAT_S = 0.5
_OTHER_FILES = 256
"""Descriptors for all that is no client's connection: tables, hosts with rows, the event loop."""
_WARM_S = 1.0
"""Between looks whether hosts with the rows are there, where no new versions are looked for."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve.

    Attributes:
        host: address to listen at.
        port: to listen at; 0 for any that is free.
        limits: of what is taken.
        token: that requests must bear.
        tls: files of the certificate chain and of its key.
        reload_s: how often to look for a new version; never when 0.
        drain_s: on SIGTERM, how long to go on answering while ``/v2/health/ready`` says 503.
        shutdown_s: then, how long requests that are open may take.
        worker_timeout_s: for the event loop of a worker to turn; it is killed then, and started
            again.
        rows: how hosts let each other in, where tables are split over several.
        shares_port: whether other processes listen at the port, too.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    limits: ServerLimits = field(default_factory=ServerLimits)
    token: str | None = None
    tls: tuple[Path, Path] | None = None
    reload_s: float = 1.0
    drain_s: float = 0.0
    shutdown_s: float = 25.0
    worker_timeout_s: float = 30.0
    rows: RowAccess | None = None
    shares_port: bool = False


def listen(options: ServerOptions) -> socket.socket:
    """A bound socket.

    Raises:
        ConfigError: when the address cannot be had.
    """
    try:
        return bound_socket(options.host, options.port, options.shares_port)
    except OSError as error:
        raise ConfigError(
            f"{options.host}:{options.port}, {error.strerror or error}",
            "an address of this machine, and a free port",
            "pass another --host or --port; --port 0 takes any that is free",
        ) from error


def url_of(listener: socket.socket, options: ServerOptions) -> str:
    """Where requests go."""
    return url_at(listener, "https" if options.tls else "http")


def run_server(
    store: ModelStore,
    options: ServerOptions,
    announce: Callable[[str], None],
    metrics: ServerMetrics | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; blocks.

    Runs in the main thread, whose handlers of these signals it replaces.

    Args:
        store: the model.
        options: how.
        announce: told the URL as soon as requests are answered.
        metrics: of this process.

    Raises:
        ConfigError: when the address cannot be had, or the certificate not be read.
    """
    metrics = metrics or ServerMetrics()
    limits = replace(options.limits, connections=num_connections(options.limits.connections))
    open_connections = OpenConnections(limits)
    service = Service(store, metrics)
    endpoints = build_endpoints(service)
    admission = AdmissionControl(endpoints, metrics, options.token, open_connections)
    service.gauges = lambda: {
        "pibroch_requests_open": admission.num_open,
        "pibroch_connections_open": len(open_connections),
        "pibroch_bytes_open": open_connections.num_bytes,
    }
    workers = store.split.workers
    if store.split.part is not None:
        assert options.rows is not None, "who holds a part gives it"
        at = options.host, options.rows
        workers = (*workers, row_service.listen(store, store.split.part, metrics, *at))
    tls = None if options.tls is None else _tls_context(*options.tls)
    config = uvicorn_config(admission, open_connections, options.shutdown_s, tls)
    with (
        ExitStack() as ending,
        listen(options) as listener,
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        for worker in workers:
            ending.callback(worker.close)
        try:
            runner.run(
                _serve(
                    uvicorn.Server(config), listener, service, admission, options, announce, workers
                )
            )
        finally:
            open_connections.abort_all()


def num_connections(most: int) -> int:
    """How many connections there are descriptors for.

    This process may have as many as it needs from now on.
    """
    if resource is None:
        return most
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + _OTHER_FILES
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return most
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # some systems have a bound that they do not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        allowed = wanted
    if allowed >= needed:
        return most
    left = max(1, allowed - _OTHER_FILES)
    logger.warning("%d connections at once, not %d: only %d files may be open", left, most, allowed)
    return left


def _tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"a certificate or key that cannot be used: {error}", "PEM files that belong together"
        ) from error
    return context


async def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    service: Service,
    admission: AdmissionControl,
    options: ServerOptions,
    announce: Callable[[str], None],
    workers: Sequence[RowWorker],
) -> None:
    loop = asyncio.get_running_loop()
    for worker in workers:
        worker.attach(loop)
    asked_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    service.batcher = Batcher(options.limits, service.metrics.batch)
    # its public method takes the signals, and raises them again
    serving = asyncio.ensure_future(server._serve([listener]))
    ending = asyncio.ensure_future(asked_to_end.wait())
    beside = [asyncio.ensure_future(_reload(service.store, options.reload_s))]
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(_POLL_S)
        if not serving.done():
            service.is_ready = True
            beside.append(asyncio.ensure_future(_beat(service.metrics)))
            announce(url_of(listener, options))
        await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
        service.is_ready = False
        admission.is_draining = True
        logger.info("ending: %d requests open", admission.num_open)
        if options.drain_s and not serving.done():
            await asyncio.sleep(options.drain_s)
        server.should_exit = True
        await serving
    finally:
        for task in (*beside, ending):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        service.batcher.close()
        for worker in workers:
            worker.detach()


async def _beat(metrics: ServerMetrics) -> None:
    """From when requests are answered on, which the first one says."""
    while True:
        metrics.beat()
        await asyncio.sleep(_BEAT_S)


async def _reload(store: ModelStore, every_s: float) -> None:
    loop = asyncio.get_running_loop()
    # requests come first, and so does a run that publishes from here
    thread = ThreadPoolExecutor(1, "pibroch-reload", give_way)
    try:
        while every_s or not store.is_warm:
            await asyncio.sleep(every_s or _WARM_S)
            try:
                await loop.run_in_executor(thread, store.warm)
                if every_s:
                    await loop.run_in_executor(thread, store.refresh)
            except Exception:
                logger.exception(
                    "looking for a new version failed; the current one stays in service"
                )
    finally:
        thread.shutdown(wait=False)
