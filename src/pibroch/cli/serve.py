"""``pibroch serve``: answers over HTTP."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pibroch.cli.console import results
from pibroch.cli.launch import die_with
from pibroch.errors import ConfigError, MissingDependencyError
from pibroch.process import num_processors, tune_process

if TYPE_CHECKING:
    from pibroch.serve.split_rows import Split

TOKEN = "PIBROCH_SERVE_TOKEN"
logger = logging.getLogger(__name__)
_ADDRESS, _MODEL, _ACCESS = "Address", "Model", "Who may ask"
_LIMITS, _PROCESSES, _HOSTS = "Limits", "Processes", "Tables over several hosts"


def serve(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="An export, a folder of numbered ones, a checkpoint or a run; the newest run here when absent."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(rich_help_panel=_ADDRESS, help="Address to listen at; 0.0.0.0 for other machines to ask.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(rich_help_panel=_ADDRESS, min=0, max=65535, help="0 for any that is free.")
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="Of the model in URLs; the folder's when absent.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_MODEL, help="A checkpoint's dataset, whose dictionaries raw rows need."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_ACCESS, help=f"Holds the token that requests must bear; or set {TOKEN}."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(rich_help_panel=_ACCESS, help="Certificate chain (PEM), for HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(rich_help_panel=_ACCESS, help="Its key (PEM).")] = None,
    batch_delay_ms: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LIMITS, min=0, max=1000, help="How long a request may wait for others to be computed with."
        ),
    ] = 0.0,
    max_rows: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, min=1, help="Of a request; more are answered with 400.")
    ] = 8192,
    max_body_mb: Annotated[
        float, typer.Option(rich_help_panel=_LIMITS, min=0.001, help="Of a request; more is answered with 413.")
    ] = 16.0,
    max_queue_rows: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, min=1, help="That wait; more are answered with 429.")
    ] = 32768,
    body_timeout: Annotated[
        float, typer.Option(rich_help_panel=_LIMITS, min=0.1, help="Seconds for a request's body to arrive; 408 then.")
    ] = 15.0,
    reload_every: Annotated[
        float, typer.Option(rich_help_panel=_MODEL, min=0, help="Seconds between looks for a new version; 0 for never.")
    ] = 1.0,
    drain: Annotated[
        float,
        typer.Option(rich_help_panel=_PROCESSES, min=0, help="Seconds to go on answering after SIGTERM, as not ready."),
    ] = 0.0,
    part: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_HOSTS,
            help="K/N: hold part K of N of an export's rows, and give them to the hosts of the others.",
        ),
    ] = None,
    rows_at: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_HOSTS,
            help="URL of the host with part 1 of the rows; again for each part in order, this host's own too.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(rich_help_panel=_PROCESSES, min=1, max=256, help="Processes at the port.")
    ] = 1,
    threads: Annotated[
        int | None, typer.Option(rich_help_panel=_PROCESSES, min=1, help="Of each worker, that compute a batch.")
    ] = None,
) -> None:
    """Answer scores over HTTP: the Open Inference Protocol v2, and raw rows at /score.

    A new version that takes the export's place is served from then on, without a failed or mixed answer. SIGTERM lets open
    requests end. See /docs of the server for its endpoints, and docs/serving.md.
    """
    _check_extra()
    tune_process(is_alone=workers == 1)
    import torch

    from pibroch.serve.server import ServerOptions, run_server
    from pibroch.serve.settings import Limits
    from pibroch.serve.store import ModelStore, newest_run
    from pibroch.serve.workers import WorkerPlace, run_workers

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("one of --tls-cert and --tls-key", "both, or none")
    limits = Limits(
        body_bytes=int(max_body_mb * (1 << 20)), rows=max_rows, batch_rows=max(max_rows, 8192),
        queue_rows=max_queue_rows, batch_delay_ms=batch_delay_ms, body_timeout_s=body_timeout,
    )  # fmt: skip
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    options = ServerOptions(host, port, limits, _token(token_file), tls, reload_s=reload_every, drain_s=drain)
    if not options.is_local and options.token is None:
        logger.warning("anybody who reaches %s may ask: no token is set (--token-file, or %s)", host, TOKEN)
    num_threads = threads or max(1, num_processors() // workers)
    torch.set_num_threads(num_threads if workers == 1 else 1)  # one that forks must have no other thread
    store = ModelStore(path or newest_run(), data, name, _split(part, rows_at or [], options.token, workers))
    if not store.current.takes_raw:
        logger.warning(
            "raw rows cannot be scored: the checkpoint's dataset is not to be found (--data, or serve an export)"
        )

    def announce(url: str) -> None:
        results.print(f"{store.name}, version {store.current.version}, at {url}")

    if workers == 1:
        run_server(store, options, announce)
        return

    def work(place: WorkerPlace, shared_port: int) -> None:
        die_with(launcher)
        torch.set_num_threads(num_threads)
        store.refresh()
        run_server(store, replace(options, port=shared_port, shares_port=True), announce, place.open_metrics())

    launcher = os.getpid()
    run_workers(work, workers, options, results.print)


def _check_extra() -> None:
    for module in ("fastapi", "uvicorn", "httptools"):
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"pibroch serve without {module}", "the extra `serve`", "pip install 'pibroch[serve]'"
            )


def _split(part: str | None, rows_at: list[str], token: str | None, workers: int) -> Split:
    """Where the rows are."""
    from pibroch.serve.parts import MOST_PARTS, Part
    from pibroch.serve.row_hosts import row_hosts
    from pibroch.serve.split_rows import Split

    if (part is not None or rows_at) and workers > 1:
        raise ConfigError(f"--part or --rows-at with --workers {workers}", "one worker", "give it --threads")
    if len(rows_at) > MOST_PARTS:
        raise ConfigError(f"{len(rows_at)} of --rows-at", f"at most {MOST_PARTS}")
    return Split(None if part is None else Part.parse(part), row_hosts(rows_at, token))


def _token(file: Path | None) -> str | None:
    """The token of a file, or of the environment; ``None`` when nobody asks for one."""
    if file is None:
        return os.environ.get(TOKEN) or None
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--token-file {file}, unreadable: {error}", "a text file that holds the token") from error
    if not token:
        raise ConfigError(f"--token-file {file}, which is empty", "a text file that holds the token")
    return token
