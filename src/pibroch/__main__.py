"""The entry point of the command line, also as ``python -m pibroch``.

One that may be interrupted while it still loads.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Load the command line and run it; see :func:`pibroch.cli.main.main`."""
    try:
        from pibroch.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
