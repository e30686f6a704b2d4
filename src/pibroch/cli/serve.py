"""``pibroch serve``: answers over HTTP."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pibroch.cli.console import results
from pibroch.errors import ConfigError, MissingDependencyError
from pibroch.host import is_loopback
from pibroch.process import num_processors, tune_process
from pibroch.secret_file import MAX_SECRET_BYTES, read_secret_file
from pibroch.title import show_as

if TYPE_CHECKING:
    from torch import Tensor

    from pibroch.serve.prometheus import ServerMetrics
    from pibroch.serve.retrieval import ItemIndex
    from pibroch.serve.row_hosts import RowAccess
    from pibroch.serve.server import ServerOptions
    from pibroch.serve.split_rows import RowSplit
    from pibroch.serve.store import ModelStore


class ItemsIndex(StrEnum):
    """How the best items are found."""

    EXACT = "exact"
    GRAPH = "graph"


TOKEN = "PIBROCH_SERVE_TOKEN"
logger = logging.getLogger(__name__)
_address = partial(typer.Option, rich_help_panel="Address")
_model = partial(typer.Option, rich_help_panel="Model")
_access = partial(typer.Option, rich_help_panel="Who may ask")
_limit = partial(typer.Option, rich_help_panel="Limits")
_process = partial(typer.Option, rich_help_panel="Processes")
_hosts = partial(typer.Option, rich_help_panel="Tables over several hosts")


def serve(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="An export, a folder of numbered ones, a checkpoint or a run; the newest run here."
        ),
    ] = None,
    host: Annotated[
        str, _address(help="Address to listen at; 0.0.0.0 for other machines to ask.")
    ] = "127.0.0.1",
    port: Annotated[int, _address(min=0, max=65535, help="0 for any that is free.")] = 8000,
    name: Annotated[
        str | None, _model(help="Of the model in URLs; the folder's when absent.")
    ] = None,
    data: Annotated[
        Path | None, _model(help="A checkpoint's dataset, whose dictionaries raw rows need.")
    ] = None,
    items: Annotated[
        Path | None,
        _model(
            help="Of a two_tower model: a row an item (Parquet, CSV), to be found by /retrieve."
        ),
    ] = None,
    items_index: Annotated[
        ItemsIndex,
        _model(help="exact, or graph: faster, with some of the best missed (extra retrieval)."),
    ] = ItemsIndex.EXACT,
    token_file: Annotated[
        Path | None, _access(help=f"Holds the token that requests must bear; or set {TOKEN}.")
    ] = None,
    tls_cert: Annotated[Path | None, _access(help="Certificate chain (PEM), for HTTPS.")] = None,
    tls_key: Annotated[Path | None, _access(help="Its key (PEM).")] = None,
    batch_delay_ms: Annotated[
        float,
        _limit(min=0, max=1000, help="How long a request may wait for others to be computed with."),
    ] = 0.0,
    max_rows: Annotated[
        int, _limit(min=1, help="Of a request; more are answered with 400.")
    ] = 8192,
    max_body_mb: Annotated[
        float, _limit(min=0.001, help="Of a request; more is answered with 413.")
    ] = 16.0,
    max_queue_rows: Annotated[
        int, _limit(min=1, help="That wait; more are answered with 429.")
    ] = 32768,
    max_connections: Annotated[
        int,
        _limit(
            min=1,
            help="Of a worker; for more the idlest is closed, or 503 answered where none is idle.",
        ),
    ] = 4096,
    max_total_mb: Annotated[
        float | None,
        _limit(
            min=0.001,
            help="Of all bodies and unread answers of a worker, then 503; 8 --max-body-mb if not.",
        ),
    ] = None,
    body_timeout: Annotated[
        float,
        _limit(
            min=0.1,
            help="Seconds for a request's headers to arrive, and then for its body; 408 then.",
        ),
    ] = 15.0,
    idle_timeout: Annotated[
        float,
        _limit(
            min=0.1,
            help="Seconds from an answer to the next request; the connection is closed then.",
        ),
    ] = 30.0,
    write_timeout: Annotated[
        float,
        _limit(
            min=0.1, help="Seconds for a client to read an answer; the connection is closed then."
        ),
    ] = 30.0,
    reload_every: Annotated[
        float, _model(min=0, help="Seconds between looks for a new version; 0 for never.")
    ] = 1.0,
    drain: Annotated[
        float, _process(min=0, help="Seconds to go on answering after SIGTERM, as not ready.")
    ] = 0.0,
    shutdown_timeout: Annotated[
        int,
        _process(
            min=1, help="Seconds for open requests to end after that; connections are closed then."
        ),
    ] = 25,
    part: Annotated[
        str | None,
        _hosts(help="K/N: hold part K of N of an export's rows, and give them to the other hosts."),
    ] = None,
    rows_at: Annotated[
        list[str] | None,
        _hosts(help="HOST:PORT of the rows of part 1; again for each part, this host's too."),
    ] = None,
    rows_port: Annotated[
        int,
        _hosts(min=0, max=65535, help="With --part: where other hosts ask; 0 for any free one."),
    ] = 8001,
    rows_authorities: Annotated[
        Path | None,
        _hosts(help="Signed all hosts' --tls-cert (PEM): rows travel by TLS, too."),
    ] = None,
    workers: Annotated[int, _process(min=1, max=256, help="Processes at the port.")] = 1,
    worker_timeout: Annotated[
        float,
        _process(
            min=2,
            help="Seconds for a worker's event loop to turn, after which it is started again.",
        ),
    ] = 30.0,
    threads: Annotated[
        int | None, _process(min=1, help="Of each worker, that compute a batch.")
    ] = None,
) -> None:
    """Answer scores over HTTP: the Open Inference Protocol v2, and raw rows at /score.

    A new version that takes the export's place is served from then on, without a failed or mixed
    answer. SIGTERM lets open requests end. See /docs of the server for its endpoints, and
    docs/serving.md.
    """
    _check_extra()
    tune_process(is_alone=workers == 1)
    import torch

    from pibroch.serve.retrieval import ExactIndex, Items
    from pibroch.serve.server import ServerOptions
    from pibroch.serve.settings import ServerLimits
    from pibroch.serve.store import ModelStore, newest_run

    total_mb = 8 * max_body_mb if max_total_mb is None else max_total_mb
    if total_mb < max_body_mb:
        raise ConfigError(f"--max-total-mb {total_mb:g}", f"at least --max-body-mb {max_body_mb:g}")
    limits = ServerLimits(
        body_bytes=int(max_body_mb * (1 << 20)),
        rows=max_rows,
        batch_rows=max(max_rows, 8192),
        queue_rows=max_queue_rows,
        batch_delay_ms=batch_delay_ms,
        body_timeout_s=body_timeout,
        write_timeout_s=write_timeout,
        idle_timeout_s=idle_timeout,
        connections=max_connections,
        total_bytes=int(total_mb * (1 << 20)),
    )
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("one of --tls-cert and --tls-key", "both, or none")
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    token = _token(token_file)
    options = ServerOptions(
        host,
        port,
        limits,
        token,
        tls,
        reload_s=reload_every,
        drain_s=drain,
        shutdown_s=shutdown_timeout,
        worker_timeout_s=worker_timeout,
        rows=_row_access(part, rows_at or [], host, rows_port, tls, rows_authorities),
    )
    if token is None and not is_loopback(host):
        logger.warning(
            "anybody who reaches %s may ask: no token is set (--token-file, or %s)", host, TOKEN
        )
    split = _split(part, rows_at or [], options.rows, workers)
    if items is not None and not split.is_whole:
        raise ConfigError("--items with --part or --rows-at", "tables that are here whole")
    if items is None and items_index is not ItemsIndex.EXACT:
        raise ConfigError(f"--items-index {items_index} without --items", "both, or none")
    index: Callable[[Tensor], ItemIndex] = ExactIndex
    if items_index is ItemsIndex.GRAPH:
        from pibroch.serve.graph_index import GraphIndex, need_faiss

        need_faiss()
        index = GraphIndex
    num_threads = threads or max(1, num_processors() // workers)
    # one that forks must have no other thread
    torch.set_num_threads(num_threads if workers == 1 else 1)
    retrieved = None if items is None else Items.read(items, index)
    store = ModelStore(path or newest_run(), data, name, split, retrieved)
    _run(store, options, workers, num_threads)


def _run(store: ModelStore, options: ServerOptions, workers: int, num_threads: int) -> None:
    """Serve until asked to end, in this process or in workers."""
    from pibroch.serve.server import run_server
    from pibroch.serve.workers import run_workers

    if not store.current.takes_raw:
        logger.warning(
            "raw rows cannot be scored: the checkpoint's dataset is not to be found (--data, or"
            " serve an export)"
        )

    def announce(url: str) -> None:
        results.print(f"{store.name}, version {store.current.version}, at {url}")

    if workers == 1:
        show_as(f"server of {store.name}", "server")
        run_server(store, options, announce)
        return

    def work(number: int, shared_port: int, metrics: ServerMetrics) -> None:
        import torch

        show_as(f"serving worker {number} of {workers} ({store.name})", f"worker {number}")
        torch.set_num_threads(num_threads)
        store.refresh()
        run_server(
            store,
            replace(options, port=shared_port, shares_port=True),
            lambda url: None,
            metrics,
        )

    show_as(f"launcher of {workers} serving workers ({store.name})", "launcher")
    run_workers(work, workers, options, announce)


def _check_extra() -> None:
    for module in ("prometheus_client", "uvicorn", "httptools"):
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"pibroch serve without {module}",
                "the extra `serve`",
                "pip install 'pibroch[serve]'",
            )


def _row_access(
    part: str | None,
    rows_at: list[str],
    host: str,
    port: int,
    tls: tuple[Path, Path] | None,
    authorities: Path | None,
) -> RowAccess | None:
    """How hosts with parts let each other in; ``None`` where all rows are here."""
    from pibroch.serve.row_hosts import RowAccess, parsed_address
    from pibroch.wire.secret import find_secret

    if authorities is not None and tls is None:
        raise ConfigError("--rows-authorities alone", "this host's --tls-cert and --tls-key, too")
    if part is None and not rows_at:
        return None
    hosts = [*(parsed_address(each)[0] for each in rows_at), *([] if part is None else [host])]
    is_here = all(map(is_loopback, hosts))
    secret = find_secret(None, os.environ, local=is_here, key="rows of hosts")
    files = None
    if tls is not None and authorities is not None:
        files = (str(tls[0]), str(tls[1]), str(authorities))
    return RowAccess(secret, files, port)


def _split(
    part: str | None, rows_at: list[str], access: RowAccess | None, workers: int
) -> RowSplit:
    """Where the rows are."""
    from pibroch.serve.parts import MOST_PARTS, Part
    from pibroch.serve.row_hosts import row_hosts
    from pibroch.serve.split_rows import RowSplit

    if access is None:
        return RowSplit()
    if workers > 1:
        raise ConfigError(
            f"--part or --rows-at with --workers {workers}", "one worker", "give it --threads"
        )
    if len(rows_at) > MOST_PARTS:
        raise ConfigError(f"{len(rows_at)} of --rows-at", f"at most {MOST_PARTS}")
    return RowSplit(None if part is None else Part.parse(part), row_hosts(rows_at, access))


def _token(file: Path | None) -> str | None:
    """The token of a file, or of the environment; ``None`` when nobody asks for one."""
    if file is not None:
        where = f"--token-file {file}"
        content = read_secret_file(file, "--token-file", stat.S_IRWXO | stat.S_IWGRP)
    elif TOKEN in os.environ:
        where = TOKEN
        content = os.environ[TOKEN].strip().encode(errors="surrogateescape")
    else:
        return None
    if not 1 <= len(content) <= MAX_SECRET_BYTES or not all(
        0x21 <= byte <= 0x7E for byte in content
    ):
        is_what = "which is empty" if not content else "which is no token"
        raise ConfigError(
            f"{where}, {is_what}",
            f"one word of at most {MAX_SECRET_BYTES} printable ASCII characters",
            f"write a token, or leave {TOKEN} unset to serve without one",
        )
    return content.decode("ascii")
