"""Who refers to which value on which worker, and when a value may go.

Pure: no sockets, threads or clocks.
"""

from pibroch.rpc.references.messages import (
    ANY_LIFE,
    MAX_BATCH,
    Message,
    News,
    Peer,
    ValuePlace,
    Wire,
)
from pibroch.rpc.references.table import ReferenceTable
from pibroch.rpc.references.user import Fork, State

__all__ = [
    "ANY_LIFE",
    "MAX_BATCH",
    "Fork",
    "Message",
    "News",
    "Peer",
    "ReferenceTable",
    "State",
    "ValuePlace",
    "Wire",
]
