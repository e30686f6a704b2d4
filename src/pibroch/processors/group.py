"""Being a data processor; apart from :mod:`~pibroch.processors.processor`, which peers may call."""

from __future__ import annotations

from pathlib import Path

from pibroch.processors import processor
from pibroch.roles import DATA_PROCESSOR, group


def serve(
    rendezvous: str, number: int, opens: bool | None = None, data: Path | None = None
) -> None:
    """Be data processor ``number`` until :func:`pibroch.roles.group.leave`.

    The process may do other things meanwhile.

    Args:
        rendezvous: ``tcp://host:port``; the others reach ``host``, and it is this machine's where
            the rendezvous is opened.
        number: from 0.
        opens: whether this process opens the rendezvous; processor 0 does, when absent.
        data: where the dataset lies here; when absent, where it lies for the trainers.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when nobody opens the rendezvous.
    """
    processor.PROCESSOR.data = data
    group.serve(DATA_PROCESSOR, rendezvous, number, number == 0 if opens is None else opens)
