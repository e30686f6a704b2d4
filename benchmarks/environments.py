"""Which Python runs which contender: this one, or that of ``benchmarks/peers/.venv``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pibroch.errors import MissingDependencyError

PEERS_VARIABLE = "PIBROCH_PEERS_PYTHON"
DEFAULT_PEERS_PYTHON = Path(__file__).resolve().parent / "peers" / ".venv" / "bin" / "python"


def our_python() -> Path:
    """The interpreter that runs this."""
    return Path(sys.executable)


def peers_python() -> Path:
    """The interpreter that has TorchRec and FBGEMM.

    Raises:
        MissingDependencyError: when there is none.
    """
    chosen = Path(os.environ.get(PEERS_VARIABLE, DEFAULT_PEERS_PYTHON))
    if not chosen.is_file():
        raise MissingDependencyError(
            f"no Python with TorchRec and FBGEMM at {chosen}",
            "the peers' environment",
            f"run benchmarks/peers/install.sh, or set {PEERS_VARIABLE} to the python of such an"
            " environment",
        )
    return chosen
