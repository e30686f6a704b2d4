"""``pibroch embedding-server``: hold embedding tables for trainers elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.process import threads_of_rank, tune_process


def embedding_server(
    meet: Annotated[
        str, typer.Option(help="tcp://HOST:PORT, the same for all. HOST is server 0's machine, as all others reach it.")
    ],
    number: Annotated[int, typer.Option(min=0, help="Of this server: 0, 1, 2, ... Number 0 opens the meeting place.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of this server; by default as many as there are processors.")
    ] = None,
    until_input_ends: Annotated[
        bool,
        typer.Option(
            "--until-input-ends", help="For a program that starts servers, opens the meeting place, and ends them."
        ),
    ] = False,
) -> None:
    """Hold embedding tables for trainers.

    A server starts empty: trainers say what it holds. It stays until it is stopped, and serves one training run after the
    other, one at a time. On one machine `pibroch train` starts servers by itself: --set embedding.servers=2. On several:

    on 10.0.0.5: pibroch embedding-server --meet tcp://10.0.0.5:29600 --number 0

    on 10.0.0.6: pibroch embedding-server --meet tcp://10.0.0.5:29600 --number 1

    trainers: pibroch train ... --set embedding.exchange=lookahead --set embedding.servers=2
    --set embedding.meet=tcp://10.0.0.5:29600

    All of them need the same secret in PIBROCH_RPC_SECRET, or the name of a file that holds it in PIBROCH_RPC_SECRET_FILE,
    unless they meet at a loopback address. PIBROCH_SERVERS_TLS=CERTIFICATE,KEY,AUTHORITIES (paths of PEM files, on
    servers and trainers) encrypts what travels.
    """
    tune_process()
    import torch

    from pibroch.servers.group import serve, server_name

    torch.set_num_threads(threads or threads_of_rank(1))
    serve(meet, number, opens=number == 0 and not until_input_ends)
    results.print(f"{server_name(number)} is ready at {meet}")
    sys.stdout.flush()
    if until_input_ends:
        sys.stdin.buffer.read()
    else:
        threading.Event().wait()
