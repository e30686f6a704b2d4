"""The search for the messages of a context that take part in a backward pass (pure).

Section 3.4 of the paper. A tensor that crossed a worker boundary is an *edge* of the graph. A
worker that reaches received tensors on its way back from its roots requests their senders to go on
from there. The requests form a diffusing computation (Dijkstra and Scholten, 1980): the first
request to a worker is answered last, when all that this worker requested was answered; every other
request is answered at once. So when the root has its answers, nothing is under way any more, and
the answers name all workers that take part.

Differs from the paper, which does not search: there all messages of a context take part.

>>> me, other = WorkerInfo("me", 0), WorkerInfo("other", 1)
>>> discovery = Discovery(me)
>>> [request] = discovery.requested("the user", [Edge(other, message=7, tensor=0)])
>>> request.worker.name, request.edges[0].message
('other', 7)
>>> [answer] = discovery.answered([other])
>>> answer.requester, sorted(worker.name for worker in answer.workers)
('the user', ['me', 'other'])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pibroch.rpc.info import WorkerInfo


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that was sent.

    Attributes:
        origin: the worker that sent it.
        message: the message that it was in.
        tensor: which of its tensors.
    """

    origin: WorkerInfo
    message: int
    tensor: int


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Request a worker to go on from tensors that it sent."""

    worker: WorkerInfo
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """Answer a request; at the root this answers the user, and the search is over.

    Attributes:
        requester: as it was passed to ``requested``.
        workers: those that take part, as far as this worker knows.
        error: why the search failed.
    """

    requester: object
    workers: frozenset[WorkerInfo]
    error: Exception | None = None


Instruction = SearchRequest | SearchAnswer


class Discovery:
    """One worker's part in the search of one backward pass.

    Args:
        me: this worker.
    """

    def __init__(self, me: WorkerInfo) -> None:
        self._me = me
        self._edges: set[Edge] = set()  # tensors received, whose gradients it will send
        self._workers = {me}
        self._num_open = 0
        self._engager: object = None  # the first requester, while it is not answered
        self._error: Exception | None = None

    def requested(self, requester: object, reached: Iterable[Edge]) -> list[Instruction]:
        """Handle a request to go on, after the walk that it started has ``reached`` these edges.

        Edges that were reached before do not count.
        """
        if self._error is not None:
            return [SearchAnswer(requester, frozenset(self._workers), self._error)]
        requests = self._requests_for(reached)
        self._num_open += len(requests)
        if self._engager is not None or not self._num_open:
            return [*requests, SearchAnswer(requester, frozenset(self._workers))]
        self._engager = requester
        return [*requests]

    def answered(self, workers: Iterable[WorkerInfo]) -> list[Instruction]:
        """Handle the answer to one of this worker's requests."""
        self._workers.update(workers)
        self._num_open -= 1
        return [] if self._num_open else self._disengage()

    def failed(self, error: Exception) -> list[Instruction]:
        """Handle the failure of one of this worker's requests: the search is over here."""
        self._error = self._error or error
        return self._disengage()

    def _requests_for(self, reached: Iterable[Edge]) -> list[SearchRequest]:
        by_origin: dict[WorkerInfo, list[Edge]] = defaultdict(list)
        for edge in reached:
            if edge not in self._edges:
                self._edges.add(edge)
                by_origin[edge.origin].append(edge)
        return [SearchRequest(origin, tuple(edges)) for origin, edges in by_origin.items()]

    def _disengage(self) -> list[Instruction]:
        requester = self._engager
        self._engager = None
        if requester is None:
            return []
        return [SearchAnswer(requester, frozenset(self._workers), self._error)]
