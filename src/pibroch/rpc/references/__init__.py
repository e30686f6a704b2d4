"""Remote references: who refers to which value on which worker, and when a value is dropped.

The protocol itself (``table.py``, ``owner.py``, ``user.py``, ``messages.py``) is pure: no sockets,
threads or clocks.
"""

from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    MAX_BATCH,
    Message,
    MessageBatch,
    Peer,
    ValuePlace,
    Wire,
)
from pibroch.rpc.references.table import ReferenceTable
from pibroch.rpc.references.user import Fork, State

__all__ = [
    "ANY_INCARNATION",
    "MAX_BATCH",
    "Fork",
    "Message",
    "MessageBatch",
    "Peer",
    "ReferenceTable",
    "State",
    "ValuePlace",
    "Wire",
]
