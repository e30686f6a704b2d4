"""A transport of one's own: messages by way of the launcher's store.

See docs/extending/transport.md.

torchrun --standalone --nproc-per-node 2 examples/own_transport.py
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from pibroch.collectives import Ranks
from pibroch.collectives.ranks import Channel
from pibroch.collectives.transport import Transport, Wait
from pibroch.collectives.transports import TRANSPORTS

_NUM_OPENED: dict[tuple[int, ...], int] = {}


class StoreTransport(Transport):
    """Every message is a key of the store.

    Nothing is quick about it, and it goes wherever the store is reached.
    """

    def __init__(self, ranks: Ranks) -> None:
        number = _NUM_OPENED[ranks.members] = _NUM_OPENED.get(ranks.members, 0) + 1
        self._store = PrefixStore(f"own/{ranks.members}/{number}", _get_default_store())
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._timeout = timedelta(seconds=ranks.timeout_s)
        self._sent = [0] * ranks.world_size
        self._taken = [0] * ranks.world_size
        self._is_open = True

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Sends now and takes when it is waited for; between two ranks messages are numbered."""
        if not self._is_open:
            raise RuntimeError("the transport is closed")
        for peer, tensor in enumerate(going):
            if peer != self._rank and tensor.numel():
                self._store.set(
                    f"{self._rank}>{peer}/{self._sent[peer]}",
                    tensor.view(torch.uint8).numpy().tobytes(),
                )
                self._sent[peer] += 1
        keys: list[tuple[str, Tensor]] = []
        for peer, tensor in enumerate(coming):
            if peer != self._rank and tensor.numel():
                keys.append((f"{peer}>{self._rank}/{self._taken[peer]}", tensor))
                self._taken[peer] += 1

        def wait() -> None:
            for key, tensor in keys:
                self._store.wait([key], self._timeout)
                message = torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.uint8)
                tensor.view(torch.uint8).copy_(message.view(tensor.view(torch.uint8).shape))
                self._store.delete_key(key)

        return wait

    def reduce(self, tensor: Tensor) -> Wait:
        """Everybody gets what everybody has, and adds it in the order of ranks.

        The same bits everywhere.
        """
        parts = [torch.empty_like(tensor) for _ in range(self._world_size)]
        self.post([tensor] * self._world_size, parts)()
        parts[self._rank] = tensor.clone()
        tensor.zero_()
        for part in parts:
            tensor += part
        return lambda: None

    def close(self) -> None:
        """The store is the launcher's: nothing to give back."""
        self._is_open = False


TRANSPORTS["store"] = StoreTransport


def main() -> None:
    """All ranks tell each other something by it."""
    dist.init_process_group("gloo")
    ranks = Ranks.joined()
    channel = Channel(ranks, TRANSPORTS["store"](ranks))
    total = torch.arange(4.0) * (ranks.rank + 1)
    channel.all_reduce(total)()
    print(f"rank {ranks.rank} of {channel.gather(ranks.rank)}: sum {total.tolist()}")
    channel.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
