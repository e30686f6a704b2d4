"""What the table of addresses means: a dictionary, and a stack of numbers to use again."""

from __future__ import annotations

from collections.abc import Iterable


class NumberOf:
    """Numbers of addresses; the one given back last is the next that is given.

    Example:
        >>> numbers = NumberOf()
        >>> numbers.find_or_add([700, 30, 700]), numbers.remove([700]), numbers.find_or_add([5])
        ([0, 1, 0], None, [0])
    """

    def __init__(self) -> None:
        self.number: dict[int, int] = {}
        self.free: list[int] = []
        self.num_given = 0

    def find_or_add(self, addresses: Iterable[int]) -> list[int]:
        """The number of each address; one without gets one."""
        return [self._found(address) for address in addresses]

    def remove(self, addresses: Iterable[int]) -> None:
        """Distinct addresses that are there give their numbers back."""
        self.free += [self.number.pop(address) for address in addresses]

    def _found(self, address: int) -> int:
        if address not in self.number:
            if self.free:
                self.number[address] = self.free.pop()
            else:
                self.number[address] = self.num_given
                self.num_given = self.num_given + 1
        return self.number[address]
