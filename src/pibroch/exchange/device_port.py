"""The way between rows, which stay in host memory, and a dense model on another device.

Copies go through pinned memory on a stream of their own, so that they run beside what the device
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError

_HOST = torch.device("cpu")


class DevicePort:
    """Copies to a device and back.

    With the CPU as device they are made all the same, without pinned memory and streams.

    Args:
        device: any that torch has an accelerator backend for, or the CPU.

    Raises:
        ConfigError: when torch does not find it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream: torch.Stream | None = None
        if self.device.type != _HOST.type:
            accelerator = (
                torch.accelerator.current_accelerator()
                if torch.accelerator.is_available()
                else None
            )
            if accelerator is None or accelerator.type != self.device.type:
                raise ConfigError(
                    f"device {device!s}",
                    f"{'cpu' if accelerator is None else f'cpu or {accelerator.type}'},"
                    " which torch finds here",
                )
            self._stream = torch.Stream(self.device)

    def to_device(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies of tensors on the device, ordered with the current stream."""
        if self._stream is None:
            return tuple(tensor.to(self.device, copy=True) for tensor in tensors)
        current = torch.accelerator.current_stream(self.device)
        with self._stream:
            copies = tuple(
                tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors
            )
        current.wait_stream(self._stream)
        for copy in copies:
            copy.record_stream(current)
        return copies

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of tensors in the host's memory; waits until the device has computed them."""
        if self._stream is None:
            return [tensor.to(_HOST, copy=True) for tensor in tensors]
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            copies = []
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._stream)
        self._stream.synchronize()
        return copies

    def batch_to_host(self, batch: Any) -> object:
        """A ragged batch in host memory, with TorchRec's methods; its tensors may be on the device.

        Any other batch is returned as it is.
        """
        if isinstance(batch, JaggedBatch) or not all(
            callable(getattr(batch, name, None)) for name in ("values", "lengths")
        ):
            return batch
        kept = {"keys": list(batch.keys())}
        for name in (
            "stride",
            "stride_per_key",
            "variable_stride_per_key",
            "inverse_indices_or_none",
        ):
            method = getattr(batch, name, None)
            if callable(method):
                kept[name] = method()
        weights_or_none = getattr(batch, "weights_or_none", None)
        moved = {"values": batch.values(), "lengths": batch.lengths()}
        if callable(weights_or_none) and (weights := weights_or_none()) is not None:
            moved["weights_or_none"] = weights
        here = {
            name: tensor.to(_HOST) if isinstance(tensor, Tensor) else tensor
            for name, tensor in moved.items()
        }
        return SimpleNamespace(**{name: _giving(value) for name, value in (kept | here).items()})


def on_device(port: DevicePort | None, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of tensors on a port's device; the tensors themselves without a port."""
    return tensors if port is None else port.to_device(tensors)


def _giving(value: object) -> object:
    return lambda: value
