"""Messages within a host through shared memory, all others over the network.

Between processes of one host the network is slow. There messages of up to LARGEST_BYTES go through
a :class:`Mailbox`; both ends know the sizes, so they agree on the way. A sender copies its message
at once and waits for nobody. There is room for 64 MiB that the others have not taken. Without room
a message stays where it is until there is some, or until its receiver expects it and so has memory
for it: then a copy goes over the network.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.gloo import GlooTransport
from pibroch.collectives.mailbox import LARGEST_BYTES, Arrival, Mailbox
from pibroch.collectives.transport import Group, Transport, Wait

IN_TURN = 0
WITHOUT_ROOM = 1
"""Tags over the network: of messages that are too large, and of announced ones without room."""


@dataclass(slots=True, eq=False)
class _Message:
    """A message to be received, or one that waits for room to be sent.

    Attributes:
        peer: the rank at its other end.
        tensor: to be filled, or to be sent.
        is_done: whether it has arrived, or was sent.
        work: torch's handle, where it goes over the network.
    """

    peer: int
    tensor: Tensor
    is_done: bool = False
    work: dist.Work | None = None


class HostTransport(Transport):
    """See the module; raises what :class:`Transport` says.

    Args:
        network: to all ranks; closed with this.
        mailbox: to those of this host.
        ranks: of the group; one that lives may send nothing for its time limit.
    """

    def __init__(self, network: GlooTransport, mailbox: Mailbox, ranks: Group) -> None:
        self._network = network
        self._members = ranks.members
        self._timeout_s = ranks.timeout_s
        self._mailbox: Mailbox | None = mailbox
        size = ranks.world_size
        self._others = [(ranks.rank + step) % size for step in range(1, size)]
        self._coming: dict[int, deque[_Message]] = {p: deque() for p in mailbox.peers}
        self._going: dict[int, deque[_Message]] = {p: deque() for p in mailbox.peers}
        self._copies: deque[tuple[dist.Work, Tensor]] = deque()
        self._lock = threading.Lock()
        self._end = finalize(self, mailbox.close)
        self._end.atexit = False  # tasks of the communication thread may be under way then

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """See :class:`Transport`; ends once all messages that find room are copied."""
        work: list[dist.Work] = []
        messages: list[_Message] = []
        with self._lock:
            mailbox = self._open_mailbox()
            for p in self._others:
                if coming[p].numel() and self._is_near(p, coming[p]):
                    messages.append(_Message(p, coming[p]))
                    self._coming[p].append(messages[-1])
                    mailbox.expect(p)
                elif coming[p].numel():
                    work.append(self._network.receive(coming[p], p, IN_TURN))
            near = [p for p in self._others if going[p].numel() and self._is_near(p, going[p])]
            work += [
                self._network.send(going[p], p, IN_TURN)
                for p in self._others
                if going[p].numel() and p not in near
            ]
            for p in near:
                if self._going[p] or not mailbox.put(p, going[p].data_ptr(), going[p].nbytes):
                    messages.append(_Message(p, going[p]))
                    self._going[p].append(messages[-1])
                    mailbox.subscribe(1)

        def wait() -> None:
            if messages:
                self._wait(messages)
            for each in work:
                each.wait()

        return wait

    def reduce(self, tensor: Tensor) -> Wait:
        """See :class:`Transport`; sums go over the network, so all runs add in the same order."""
        return self._network.reduce(tensor)

    def close(self) -> None:
        """See :class:`Transport`."""
        self._mailbox = None
        self._end()
        self._network.close()

    def _is_near(self, p: int, tensor: Tensor) -> bool:
        return p in self._coming and tensor.nbytes <= LARGEST_BYTES

    def _wait(self, messages: Sequence[_Message]) -> None:
        start = time.monotonic()
        mailbox = self._open_mailbox()
        while True:
            seen = mailbox.shown()
            missing = self._advance(mailbox, messages)
            if not missing:
                break
            if mailbox.sleep(seen):
                continue
            lost = [p for p in missing if mailbox.is_lost(p)]
            late = time.monotonic() - start > self._timeout_s
            # once more, as a rank that has ended may have sent its messages before
            if (lost or late) and (missing := self._advance(mailbox, messages)):
                self._give_up([p for p in lost if p in missing], missing)
        for each in messages:
            if each.work is not None:
                each.work.wait()

    def _advance(self, mailbox: Mailbox, messages: Sequence[_Message]) -> list[int]:
        """Take what has arrived for these messages, and send what waits for room.

        Returns the ranks of those that are not done.
        """
        with self._lock:
            for p, waiting in self._going.items():
                while waiting and self._send(mailbox, p, waiting[0]):
                    waiting.popleft()
                    mailbox.subscribe(-1)
            for p in {each.peer for each in messages if not each.is_done}:
                while self._coming[p] and (arrival := mailbox.arrival(p)) is not None:
                    self._take(mailbox, p, self._coming[p].popleft(), arrival)
            return sorted({each.peer for each in messages if not each.is_done})

    def _send(self, mailbox: Mailbox, p: int, message: _Message) -> bool:
        """Send a message that had no room, if there is some now or its receiver expects it."""
        tensor = message.tensor
        if mailbox.put(p, tensor.data_ptr(), tensor.nbytes):
            message.is_done = True
        elif mailbox.is_expected(p) and mailbox.announce(p, tensor.nbytes):
            copy = tensor.clone()
            self._copies.append((self._network.send(copy, p, WITHOUT_ROOM), copy))
            message.is_done = True
        while self._copies and self._copies[0][0].is_completed():
            self._copies.popleft()
        return message.is_done

    def _take(self, mailbox: Mailbox, p: int, message: _Message, arrival: Arrival) -> None:
        if arrival.nbytes != message.tensor.nbytes:
            raise RuntimeError(
                f"rank {self._members[p]} sent {arrival.nbytes} bytes where {message.tensor.nbytes}"
                " are expected: all ranks must make the same calls in the same order"
            )
        if arrival.place == 0:
            message.work = self._network.receive(message.tensor, p, WITHOUT_ROOM)
        mailbox.take(p, arrival, message.tensor.data_ptr())
        message.is_done = True

    def _give_up(self, lost: Sequence[int], missing: Sequence[int]) -> None:
        if lost:
            raise RuntimeError(
                f"the process of rank {self._members[lost[0]]} has ended, or closed this channel"
            )
        names = [self._members[p] for p in missing]
        raise RuntimeError(
            f"nothing of ranks {names} in {self._timeout_s:g} s, though their processes live"
        )

    def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            raise RuntimeError("a channel that was closed")
        return self._mailbox
