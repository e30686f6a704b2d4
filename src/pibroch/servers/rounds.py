"""The order of what trainers ask of a server: round by round.

A round has one message of every trainer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pibroch.errors import ProtocolError

M = TypeVar("M")


class Rounds(Generic[M]):
    """Messages in, whole rounds out.

    A trainer may be ahead of the others; nobody overtakes a round.

    Args:
        num_trainers: messages in a round.

    Example:
        >>> rounds = Rounds(2)
        >>> rounds.add(1, 0, "b"); rounds.add(1, 1, "d"); rounds.take()
        >>> rounds.add(0, 0, "a"); rounds.take()
        ['a', 'b']
        >>> rounds.take()
    """

    def __init__(self, num_trainers: int) -> None:
        self.num_trainers = num_trainers
        self.number = 0
        """Of the round that is taken next."""
        self._waiting: dict[int, dict[int, M]] = {}

    def add(self, trainer: int, number: int, message: M) -> None:
        """A trainer's message in a round.

        Raises:
            ProtocolError: for a trainer that is none, a round that is over, or a second message.
        """
        if not 0 <= trainer < self.num_trainers:
            raise ProtocolError(f"trainer {trainer}", f"one below {self.num_trainers}")
        if number < self.number or trainer in self._waiting.get(number, {}):
            raise ProtocolError(
                f"a message of trainer {trainer} in round {number}",
                "one in a round, before it is over",
            )
        self._waiting.setdefault(number, {})[trainer] = message

    def begin(self, number: int) -> None:
        """Begin with another round than 0; what came of those before is forgotten."""
        self.number = number
        self._waiting = {
            each: of_round for each, of_round in self._waiting.items() if each >= number
        }

    def take(self) -> list[M] | None:
        """The messages of the next round, in the order of the trainers, once all are there."""
        if len(self._waiting.get(self.number, {})) < self.num_trainers:
            return None
        messages = self._waiting.pop(self.number)
        self.number += 1
        return [messages[trainer] for trainer in range(self.num_trainers)]

    def clear(self) -> list[M]:
        """All messages that wait; they are forgotten."""
        waiting = [message for messages in self._waiting.values() for message in messages.values()]
        self._waiting.clear()
        return waiting
