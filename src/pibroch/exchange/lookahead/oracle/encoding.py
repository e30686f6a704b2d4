"""Plans as bytes, and back: what sends them sees two arrays.

Each array of a plan travels as differences to its least number, in as few bytes as the greatest
needs; where the steps from number to number need fewer bytes, these travel instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ProtocolError
from pibroch.exchange.lookahead.oracle.kernels.window import Gradients, Transfer
from pibroch.exchange.lookahead.oracle.oracle import Opening, StepPlan

T = TypeVar("T", Transfer, Gradients)
A = TypeVar("A", Opening, StepPlan)
Integers = NDArray[np.signedinteger]
MOST_NUMBERS = 1 << 31
"""In one array. Equal numbers take no bytes, so the bytes received do not bound the length."""
_WIDTHS = (0, 1, 2, 3, 4, 8)
_FIELDS = 7  # numbers in the head for an array, see _packed


class Parts(NamedTuple):
    """A plan as numbers, to be sent.

    Attributes:
        head: int64: the plan's numbers, then ``_FIELDS`` numbers for each array.
        body: uint8: the arrays, one after the other.
    """

    head: NDArray[np.int64]
    body: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return sum(part.nbytes for part in self)


def encode(answer: Opening | StepPlan) -> Parts:
    """An answer of the oracle as numbers.

    Example:
        >>> import numpy as np
        >>> from pibroch.exchange.lookahead.oracle import Oracle
        >>> oracle = Oracle(np.array([0, 4, 8]), rank=0, lookahead=1, capacity=4)
        >>> oracle.add([np.array([2, 5]), np.array([5])])
        >>> decode_opening(encode(oracle.open())).places
        array([2, 4])
    """
    return _encode_opening(answer) if isinstance(answer, Opening) else _encode_plan(answer)


def _encode_opening(opening: Opening) -> Parts:
    transfers = [opening.now, *([] if opening.prefetch is None else [opening.prefetch])]
    return _pack([len(transfers)], [*_flat(transfers), opening.places])


def decode_opening(parts: Parts) -> Opening:
    """Decode an opening.

    Raises:
        ProtocolError: for what is no opening.
    """
    reader = _Reader(parts, 1)
    (num_transfers,) = reader.numbers
    now = reader.take(Transfer)
    prefetch = reader.take(Transfer) if num_transfers > 1 else None
    return reader.done(Opening(now, prefetch, reader.array()))


def _encode_plan(plan: StepPlan) -> Parts:
    has_prefetch = plan.prefetch is not None
    numbers = [plan.number, plan.is_tight, plan.lookahead, len(plan.evicted), has_prefetch]
    transfers = [plan.next_step, *plan.evicted, *([] if plan.prefetch is None else [plan.prefetch])]
    gradients = [plan.critical, plan.deferred, plan.local]
    return _pack(
        numbers, [*_flat(transfers), *_flat(gradients), plan.places, plan.used, plan.early]
    )


def decode_plan(parts: Parts) -> StepPlan:
    """Decode a plan.

    Raises:
        ProtocolError: for what is no plan.
    """
    reader = _Reader(parts, 5)
    number, is_tight, lookahead, num_evicted, has_prefetch = reader.numbers
    next_step = reader.take(Transfer)
    evicted = [reader.take(Transfer) for _ in range(num_evicted)]
    prefetch = reader.take(Transfer) if has_prefetch else None
    critical, deferred, local = (reader.take(Gradients) for _ in range(3))
    places = reader.array()
    used = reader.array()
    early = reader.array()
    return reader.done(
        StepPlan(
            number,
            critical,
            bool(is_tight),
            next_step,
            deferred,
            local,
            evicted,
            prefetch,
            places,
            lookahead,
            used,
            early,
        )
    )


def _flat(groups: Sequence[Transfer] | Sequence[Gradients]) -> list[Integers]:
    return [array for group in groups for array in group]


def _pack(numbers: Sequence[int], arrays: Sequence[Integers]) -> Parts:
    head = [*map(int, numbers)]
    body = [np.empty(0, np.uint8)]
    for array in arrays:
        described, data = _packed(array)
        head += described
        body.append(data)
    return Parts(np.array(head), np.concatenate(body))


def _packed(array: Integers) -> tuple[list[int], NDArray[np.uint8]]:
    """An array's numbers in the head, and its bytes.

    In the head: rows (0 for one dimension), length, bytes of a number in memory, whether steps
    travel, the least number, bytes of a number in the body, the first number.

    Example:
        >>> import numpy as np
        >>> _packed(np.array([1000, 1007, 1300]))
        ([0, 3, 8, False, 1000, 2, 0], array([ 0,  0,  7,  0, 44,  1], dtype=uint8))
    """
    assert array.dtype in (np.int32, np.int64), f"plans hold integers, not {array.dtype}"
    flat = array.ravel().astype(np.int64, copy=False)
    low, width = _range(flat)
    steps = np.diff(flat, prepend=flat[:1])
    step_low, step_width = _range(steps[1:])
    takes_steps = step_width < width
    head = [array.shape[0] if array.ndim > 1 else 0, flat.size, array.itemsize, takes_steps]
    if takes_steps:
        first = int(flat[0])
        steps[0] = step_low
        return [*head, step_low, step_width, first], _bytes(steps - step_low, step_width)
    return [*head, low, width, 0], _bytes(flat - low, width)


def _range(numbers: NDArray[np.int64]) -> tuple[int, int]:
    """The least number, and how many bytes the distance of the greatest to it takes."""
    if not len(numbers):
        return 0, 0
    low = int(numbers.min())
    high = int(numbers.max())
    return low, next(width for width in _WIDTHS if high - low < 1 << 8 * width)


def _bytes(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The low bytes of numbers from 0 on."""
    if width == 8:
        return numbers.view(np.uint8)
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].ravel()


def _numbers(data: NDArray[np.uint8], length: int, width: int) -> NDArray[np.int64]:
    if width == 8:
        return data.copy().view(np.int64)
    padded = np.zeros((length, 4), np.uint8)
    padded[:, :width] = data.reshape(length, width)
    return padded.view("<u4").ravel().astype(np.int64)


@dataclass(slots=True)
class _Reader:
    """Takes arrays out in the order in which they were put in; each a copy of its own."""

    parts: Parts
    num_numbers: int
    at: int = 0
    body_at: int = 0

    @property
    def numbers(self) -> list[int]:
        if len(self.parts.head) < self.num_numbers:
            raise _torn()
        self.at = self.num_numbers
        return [int(number) for number in self.parts.head[: self.num_numbers]]

    def take(self, kind: type[T]) -> T:
        return kind(*(self.array() for _ in kind._fields))

    def array(self) -> Integers:
        described = self.parts.head[self.at : self.at + _FIELDS].tolist()
        if len(described) < _FIELDS:
            raise _torn()
        num_rows, length, itemsize, takes_steps, low, width, first = described
        end = self.body_at + length * width
        data = self.parts.body[self.body_at : end]
        is_whole = length >= 0 and width in _WIDTHS and len(data) == length * width
        if not is_whole or (num_rows and length % num_rows) or length > MOST_NUMBERS:
            raise _torn()
        self.at = self.at + _FIELDS
        self.body_at = end
        numbers = _numbers(data, length, width)
        numbers += low
        if takes_steps and length:
            numbers[0] = first
            np.cumsum(numbers, out=numbers)
        array: Integers = numbers.astype(np.int32) if itemsize == 4 else numbers
        return array.reshape(num_rows, -1) if num_rows else array

    def done(self, answer: A) -> A:
        if [self.at, self.body_at] != [len(part) for part in self.parts]:
            raise _torn()
        return answer


def _torn() -> ProtocolError:
    return ProtocolError("numbers that are no plan", "a plan of the same version of pibroch")
