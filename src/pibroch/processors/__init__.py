"""Data processors: processes that read, shuffle and collate batches for trainers.

Trainers reach them by the tensor RPC.

See docs/roles.md, and docs/design/0007-data-processors.md for why it is as it is.
"""

from pibroch.processors.client import Processors
from pibroch.processors.group import serve

__all__ = ["Processors", "serve"]
