"""Data processors: they make the batches in place of the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pibroch.roles.role import Role, RoleOption

if TYPE_CHECKING:
    from pibroch.config import RunConfig


def _described(config: RunConfig) -> tuple[str, str]:
    if config.data.processors:
        return "data processor", "reads, shuffles and collates batches for all trainers"
    return "data", "reads and shuffles the trainer's part of each batch"


ROLE = Role(
    title="data processor",
    worker="processor",
    command="data-processor",
    functions="pibroch.processors.processor",
    block=2,
    folder="processors",
    serving="pibroch.processors:serve",
    first="embedding server 0, or the oracle,",
    restarts=10,
    is_needed=False,  # others make its batches
    options={
        "data": RoleOption(
            Path | None, "The trainers' dataset, where it lies elsewhere on this machine."
        )
    },
    counted=lambda config: config.data.processors,
    rendezvous=lambda config: config.data.rendezvous,
    described=_described,
    help="""Read, shuffle and collate batches for trainers.

    Trainers say what they want of which dataset, and get the batches that they would make
    themselves. A processor stays until it is stopped, and serves any number of runs. Each trainer
    asks all processors in turn; it reads the dataset's manifest and, for evaluation, its other
    splits itself. On one machine `pibroch train` starts processors by itself: --set
    data.processors=2. On several:

    on 10.0.0.7: pibroch data-processor --rendezvous tcp://10.0.0.7:29700 --number 0

    on 10.0.0.8: pibroch data-processor --rendezvous tcp://10.0.0.7:29700 --number 1 --data
    /local/criteo

    trainers: pibroch train ... --set data.processors=2 --set data.rendezvous=tcp://10.0.0.7:29700

    Where a run has embedding servers too, all meet at one place: give server 0's address
    everywhere, and processors --with-servers. All of them need the same secret in
    PIBROCH_RPC_SECRET, or the name of a file that holds it in PIBROCH_RPC_SECRET_FILE, unless they
    meet at a loopback address. PIBROCH_SERVERS_TLS=CERTIFICATE,KEY,AUTHORITIES (paths of PEM files,
    on processors and trainers) encrypts what travels.
    """,
)
