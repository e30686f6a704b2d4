"""``pibroch embedding-server``, ``pibroch oracle`` and ``pibroch data-processor``: serve trainers elsewhere."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from pibroch.cli.console import results
from pibroch.cli.launch import die_with_parent
from pibroch.process import threads_of_rank, tune_process

Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of this process; by default as many as there are processors.")
]
UntilInputEnds = Annotated[
    bool,
    typer.Option(
        "--until-input-ends", help="For a program that starts this process, opens the meeting place, and ends it."
    ),
]


def embedding_server(
    meet: Annotated[
        str, typer.Option(help="tcp://HOST:PORT, the same for all. HOST is server 0's machine, as all others reach it.")
    ],
    number: Annotated[int, typer.Option(min=0, help="Of this server: 0, 1, 2, ... Number 0 opens the meeting place.")],
    threads: Threads = None,
    until_input_ends: UntilInputEnds = False,
) -> None:
    """Hold embedding tables for trainers.

    A server starts empty: trainers say what it holds. It stays until it is stopped, and serves one training run after the
    other, one at a time. On one machine `pibroch train` starts servers by itself: --set
    embedding.exchange.servers=2. On several:

    on 10.0.0.5: pibroch embedding-server --meet tcp://10.0.0.5:29600 --number 0

    on 10.0.0.6: pibroch embedding-server --meet tcp://10.0.0.5:29600 --number 1

    trainers: pibroch train ... --set embedding.exchange=lookahead --set embedding.exchange.servers=2
    --set embedding.exchange.meet=tcp://10.0.0.5:29600

    All of them need the same secret in PIBROCH_RPC_SECRET, or the name of a file that holds it in PIBROCH_RPC_SECRET_FILE,
    unless they meet at a loopback address. PIBROCH_SERVERS_TLS=CERTIFICATE,KEY,AUTHORITIES (paths of PEM files, on
    servers and trainers) encrypts what travels.
    """
    _tune(threads, until_input_ends)
    from pibroch.roles import EMBEDDING_SERVER
    from pibroch.servers import serve

    serve(meet, number, opens=number == 0 and not until_input_ends)
    _stay(f"{EMBEDDING_SERVER.name(number)} is ready at {meet}", until_input_ends)


def oracle(
    meet: Annotated[
        str, typer.Option(help="tcp://HOST:PORT, the same for all. HOST is this machine, as all others reach it.")
    ],
    with_servers: Annotated[
        bool, typer.Option("--with-servers", help="Meet where embedding server 0 opens the meeting place.")
    ] = False,
    number: Annotated[int, typer.Option(min=0, max=0, hidden=True)] = 0,
    threads: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
    until_input_ends: UntilInputEnds = False,
) -> None:
    """Plan for all trainers which rows travel when.

    With the exchange `lookahead` each trainer plans for itself, from the ids of all. One oracle for all takes that work from
    them, and sends each its plan: less computing on trainers, more bytes. It stays until it is stopped, and serves one
    training run after the other. On one machine `pibroch train` starts it by itself: --set
    embedding.exchange.oracle=central. On several:

    on 10.0.0.5: pibroch oracle --meet tcp://10.0.0.5:29600

    trainers: pibroch train ... --set embedding.exchange=lookahead --set embedding.exchange.oracle=central
    --set embedding.exchange.meet=tcp://10.0.0.5:29600

    Where a run has embedding servers too, all meet at one place: give server 0's address everywhere, and the oracle
    --with-servers. Secret and TLS are as for `pibroch embedding-server`.
    """
    _tune(1, until_input_ends)  # it has a thread for each trainer
    from pibroch.servers import ORACLE_NAME, serve_plans

    serve_plans(meet, number, opens=not until_input_ends and not with_servers)
    _stay(f"{ORACLE_NAME} is ready at {meet}", until_input_ends)


def data_processor(
    meet: Annotated[
        str,
        typer.Option(help="tcp://HOST:PORT, the same for all. HOST is processor 0's machine, as all others reach it."),
    ],
    number: Annotated[
        int, typer.Option(min=0, help="Of this processor: 0, 1, 2, ... Number 0 opens the meeting place.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="The trainers' dataset, where it lies elsewhere on this machine.")
    ] = None,
    with_servers: Annotated[
        bool,
        typer.Option("--with-servers", help="Meet where embedding server 0, or the oracle, opens the meeting place."),
    ] = False,
    threads: Threads = None,
    until_input_ends: UntilInputEnds = False,
) -> None:
    """Read, shuffle and collate training batches for trainers.

    Trainers say what they want of which dataset, and get the batches that they would make themselves. A processor stays until
    it is stopped, and serves any number of runs. Each trainer asks all processors in turn; it reads the dataset's manifest
    and, for evaluation, its other splits itself. On one machine `pibroch train` starts processors by itself:
    --set data.processors=2. On several:

    on 10.0.0.7: pibroch data-processor --meet tcp://10.0.0.7:29700 --number 0

    on 10.0.0.8: pibroch data-processor --meet tcp://10.0.0.7:29700 --number 1 --data /local/criteo

    trainers: pibroch train ... --set data.processors=2 --set data.meet=tcp://10.0.0.7:29700

    Where a run has embedding servers too, all meet at one place: give server 0's address everywhere, and processors
    --with-servers. All of them need the same secret in PIBROCH_RPC_SECRET, or the name of a file that holds it in
    PIBROCH_RPC_SECRET_FILE, unless they meet at a loopback address. PIBROCH_SERVERS_TLS=CERTIFICATE,KEY,AUTHORITIES (paths
    of PEM files, on processors and trainers) encrypts what travels.
    """
    _tune(threads, until_input_ends)
    from pibroch.processors import serve
    from pibroch.roles import DATA_PROCESSOR

    serve(meet, number, opens=number == 0 and not until_input_ends and not with_servers, data=data)
    _stay(f"{DATA_PROCESSOR.name(number)} is ready at {meet}", until_input_ends)


def _tune(threads: int | None, until_input_ends: bool) -> None:
    if until_input_ends:
        die_with_parent()  # also when this process is stopped, and reads nothing
    tune_process(is_alone=False)
    import torch

    torch.set_num_threads(threads or threads_of_rank(1))


def _stay(ready: str, until_input_ends: bool) -> None:
    results.print(ready)
    sys.stdout.flush()
    if until_input_ends:
        sys.stdin.buffer.read()
    else:
        threading.Event().wait()
