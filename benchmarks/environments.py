"""Which Python runs which contender: this one, or one of the peers' under ``benchmarks/peers``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pibroch.errors import MissingDependencyError

PEERS_VARIABLE = "PIBROCH_PEERS_PYTHON"
FUXICTR_VARIABLE = "PIBROCH_FUXICTR_PYTHON"
RECBOLE_VARIABLE = "PIBROCH_RECBOLE_PYTHON"
_PEERS = Path(__file__).resolve().parent / "peers"
_PYTHON = Path(".venv", "bin", "python")


def our_python() -> Path:
    """The interpreter that runs this."""
    return Path(sys.executable)


def peers_python() -> Path:
    """The interpreter that has TorchRec and FBGEMM.

    Raises:
        MissingDependencyError: when there is none.
    """
    install = "benchmarks/peers/install.sh"
    return _found(PEERS_VARIABLE, _PEERS / _PYTHON, "TorchRec and FBGEMM", install)


def fuxictr_python() -> Path:
    """The interpreter that has FuxiCTR.

    Raises:
        MissingDependencyError: when there is none.
    """
    install = "benchmarks/peers/install.sh --fuxictr"
    return _found(FUXICTR_VARIABLE, _PEERS / "fuxictr" / _PYTHON, "FuxiCTR", install)


def recbole_python() -> Path:
    """The interpreter that has RecBole.

    Raises:
        MissingDependencyError: when there is none.
    """
    install = "benchmarks/peers/install.sh --recbole"
    return _found(RECBOLE_VARIABLE, _PEERS / "recbole" / _PYTHON, "RecBole", install)


def _found(variable: str, default: Path, packages: str, install: str) -> Path:
    chosen = Path(os.environ.get(variable, default))
    if not chosen.is_file():
        raise MissingDependencyError(
            f"no Python with {packages} at {chosen}",
            "the peers' environment",
            f"run {install}, or set {variable} to the python of such an environment",
        )
    return chosen
