"""How float32 rows and gradients travel between ranks: as they are, in 16 bits, or compressed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.errors import ConfigError
from pibroch.exchange.compression import Numbers, exchange_compressed
from pibroch.kernels.arrays import Records

Spans = Sequence[tuple[int, int]]
"""For each rank the floats of its whole records, and those of its weights."""
WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class RowWire:
    """Carries the numbers of one exchange between ranks.

    The communication thread calls it, on all ranks in the same order.

    Args:
        channel: between the ranks.
        name: of the type: ``float32``, ``bfloat16`` or ``float16``.
        compress: whether numbers travel compressed, see :mod:`pibroch.exchange.compression`.

    Attributes:
        dtype: of this name.
        sent: bytes to other ranks so far.

    Raises:
        ConfigError: when there is no such type.
    """

    def __init__(self, channel: Channel, name: str = "float32", compress: bool = False) -> None:
        if name not in WIRES:
            raise ConfigError(f"wire {name!r}", f"one of {', '.join(WIRES)}")
        self.channel = channel
        self.dtype = WIRES[name]
        self.compress = compress
        self.sent = 0

    @property
    def is_exact(self) -> bool:
        """Whether numbers arrive as they were."""
        return self.dtype == torch.float32

    def rounded(self, rows: Records) -> Records:
        """Rows as they arrive elsewhere.

        Rows of this rank are read rounded, too, so that places change no bit.
        """
        if self.is_exact:
            return rows
        return torch.from_numpy(rows).to(self.dtype).float().numpy()

    def carry(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """Send ``send_counts[p]`` consecutive ones of float32 ``rows`` to each rank p.

        Returns the rows of all ranks, in rank order.

        Args:
            rows: ``[sum(send_counts), ...]``.
            send_counts: rows for each rank.
            receive_counts: rows from each rank.
            out: to be filled with them and returned, if there are several ranks.
        """
        ranks = self.channel.ranks
        if ranks.world_size == 1 or not self.compress:
            narrow = rows.to(self.dtype)
            self.sent += (
                (sum(send_counts) - send_counts[ranks.rank])
                * self.dtype.itemsize
                * math.prod(rows.shape[1:])
            )
            received = self.channel.all_to_all(
                narrow, send_counts, receive_counts, out if self.is_exact else None
            )
            return received.float() if out is None or received is out else out.copy_(received)
        if out is None:
            out = torch.empty(sum(receive_counts), *rows.shape[1:])
        width = math.prod(rows.shape[1:])
        spans = (
            [(0, width * count) for count in send_counts],
            [(0, width * count) for count in receive_counts],
        )
        self.carry_mixed(rows.numpy().reshape(-1), spans[0], out.numpy().reshape(-1), spans[1])
        return out

    def carry_mixed(
        self, message: Records, send_counts: Spans, received: Records, receive_counts: Spans
    ) -> None:
        """Send records, as float32, and weights, in the wire's type, and fill ``received``.

        Args:
            message: for each rank in turn its records, then its weights.
            send_counts: how many floats of both for each rank.
            received: likewise, from each rank.
            receive_counts: how many of both from each rank.
        """
        if self.is_exact and not self.compress:
            self.carry(
                torch.from_numpy(message),
                [*map(sum, send_counts)],
                [*map(sum, receive_counts)],
                torch.from_numpy(received),
            )
            return
        sending = [
            [records.view(np.uint32), self._narrowed(weights)]
            for records, weights in _split(message, send_counts)
        ]
        places = _split(received, receive_counts)
        arriving = [
            [records.view(np.uint32), self._room_for(weights)] for records, weights in places
        ]
        # both sides know the spans of all parts, so parts follow each other without headers
        if self.compress:
            self.sent += exchange_compressed(self.channel, sending, arriving)
        else:
            self._exchange(sending, arriving)
        if not self.is_exact:
            for (_, weights), (_, narrow) in zip(places, arriving, strict=True):
                torch.from_numpy(weights).copy_(
                    torch.from_numpy(narrow.view(np.int16)).view(self.dtype)
                )

    def _narrowed(self, weights: Records) -> Numbers:
        if self.is_exact:
            return weights.view(np.uint32)
        return torch.from_numpy(weights).to(self.dtype).view(torch.int16).numpy().view(np.uint16)

    def _room_for(self, weights: Records) -> Numbers:
        return weights.view(np.uint32) if self.is_exact else np.empty(len(weights), np.uint16)

    def _exchange(self, sending: list[list[Numbers]], arriving: list[list[Numbers]]) -> None:
        send_counts, receive_counts = (
            [sum(part.nbytes for part in parts) for parts in each] for each in (sending, arriving)
        )
        message = np.concatenate([part.view(np.uint8) for parts in sending for part in parts])
        self.sent += sum(send_counts) - send_counts[self.channel.ranks.rank]
        received = self.channel.all_to_all(
            torch.from_numpy(message), send_counts, receive_counts
        ).numpy()
        first = 0
        for part in (part for parts in arriving for part in parts):
            part.view(np.uint8)[:] = received[first : first + part.nbytes]
            first += part.nbytes


def _split(floats: Records, spans: Spans) -> list[tuple[Records, Records]]:
    """Views of each rank's records and of its weights."""
    pieces = np.split(floats, np.cumsum([size for span in spans for size in span])[:-1])
    return list(zip(pieces[0::2], pieces[1::2], strict=True))
