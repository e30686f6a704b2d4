"""The backend ``bls`` in torch.distributed's list of backends.

torch calls :func:`register` at the end of its own import, as entry point of the group
``torch.backends``, in every program where pibroch is installed. So neither this module nor the
package loads anything that such a program would notice.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

NAME = "bls"


def register() -> None:
    """Make ``bls`` known to torch.distributed, if that is loaded and does not know it.

    What the backend is made of loads with the first group of it.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or getattr(c10d.__spec__, "_initializing", False):
        return  # no torch yet, or one built without torch.distributed
    if NAME not in c10d.Backend.backend_list:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(*arguments: object) -> Any:
    return import_module("pibroch.collectives.bounded_lag.process_group").create(*arguments)
