"""Which messages of a context take part in a backward pass, and when all of them are known (pure; paper, section 3.4).

A tensor that crossed a worker boundary is an *edge* of the graph. A worker that finds, going back
from its roots, tensors which it received asks their senders to go on from there. Who asks whom is a
diffusing computation (Dijkstra and Scholten, 1980): the first to ask a worker is answered last,
when all that this worker asked have answered; everyone else is answered at once. So when the root
has its answers, nothing is under way any more, and the answers name all workers that take part.

Differs from the paper: it takes all messages of a context for participants, and does not look.

>>> me, other = WorkerInfo("me", 0), WorkerInfo("other", 1)
>>> discovery = Discovery(me)
>>> [ask] = discovery.asked("the user", [Edge(other, message=7, tensor=0)])
>>> ask.worker.name, ask.edges[0].message
('other', 7)
>>> [answer] = discovery.answered([other])
>>> answer.asker, sorted(worker.name for worker in answer.workers)
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
class Ask:
    """Ask a worker to go on from tensors that it sent."""

    worker: WorkerInfo
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """Answer one that asked; at the root this is the user: the search is over.

    Attributes:
        asker: what ``asked`` was given.
        workers: those that take part, as far as this worker knows.
        error: why the search failed.
    """

    asker: object
    workers: frozenset[WorkerInfo]
    error: Exception | None = None


Instruction = Ask | SearchAnswer


class Discovery:
    """One worker's part in the search of one backward pass.

    Args:
        me: this worker.
    """

    def __init__(self, me: WorkerInfo) -> None:
        self._me = me
        self._known: set[Edge] = set()
        self._workers = {me}
        self._num_open = 0
        self._is_engaged = False
        self._engager: object = None  # who asked first, while it is not answered
        self._error: Exception | None = None

    @property
    def edges(self) -> frozenset[Edge]:
        """The edges found here: tensors that this worker received and whose gradients it will send."""
        return frozenset(self._known)

    def asked(self, asker: object, found: Iterable[Edge]) -> list[Instruction]:
        """``asker`` wanted this worker to go on, which reached ``found``.

        Edges that are known already do not count.
        """
        if self._error is not None:
            return [SearchAnswer(asker, frozenset(self._workers), self._error)]
        asks = self._ask(found)
        self._num_open += len(asks)
        if self._is_engaged or not self._num_open:
            return [*asks, SearchAnswer(asker, frozenset(self._workers))]
        self._is_engaged = True
        self._engager = asker
        return [*asks]

    def answered(self, workers: Iterable[WorkerInfo]) -> list[Instruction]:
        """One that this worker asked has answered."""
        self._workers.update(workers)
        self._num_open -= 1
        if self._num_open or not self._is_engaged:
            return []
        return self._disengage()

    def failed(self, error: Exception) -> list[Instruction]:
        """One that this worker asked failed or was lost.

        The search is over, for all that asked this worker.
        """
        self._error = self._error or error
        return self._disengage() if self._is_engaged else []

    def _ask(self, found: Iterable[Edge]) -> list[Ask]:
        by_origin: dict[WorkerInfo, list[Edge]] = defaultdict(list)
        for edge in found:
            if edge not in self._known:
                self._known.add(edge)
                by_origin[edge.origin].append(edge)
        return [Ask(origin, tuple(edges)) for origin, edges in by_origin.items()]

    def _disengage(self) -> list[Instruction]:
        asker = self._engager
        self._is_engaged = False
        self._engager = None
        return [SearchAnswer(asker, frozenset(self._workers), self._error)]
