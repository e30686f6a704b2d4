"""Tensors of accelerators travel by way of the CPU, in pinned memory for CUDA.

``device_maps`` map a device of the sender to one of the receiver, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pibroch.errors import NotAllowedError, ProtocolError

DeviceMap = Mapping[torch.device, torch.device]


def stage(
    tensors: list[torch.Tensor], device_maps: Mapping[str, DeviceMap], to: str
) -> list[int | None]:
    """Replace tensors of the list by copies on the CPU; blocks until these are done.

    Returns:
        The index of the receiver's device for each tensor, ``None`` for its CPU; an empty list when
        all tensors were on the CPU.

    Raises:
        NotAllowedError: for a tensor on a device that the map does not have.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            break
    else:
        return []
    device_map = device_maps.get(to, {})
    targets = [_target(tensor.device, device_map, to) for tensor in tensors]
    used = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    tensors[:] = [tensor if tensor.device.type == "cpu" else _to_cpu(tensor) for tensor in tensors]
    for device in used:
        torch.cuda.current_stream(device).synchronize()
    return targets


def unstage(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A received tensor on CUDA device ``index`` of this worker.

    Raises:
        ProtocolError: when there is no such device.
    """
    if not torch.cuda.is_available() or not 0 <= index < torch.cuda.device_count():
        raise ProtocolError(
            f"a tensor for device cuda:{index}", "one of this worker's devices", "see device_maps"
        )
    return tensor.to(torch.device("cuda", index))


def _target(device: torch.device, device_map: DeviceMap, to: str) -> int | None:
    if device.type == "cpu":
        return None
    target = device_map.get(device)
    if target is None:
        raise NotAllowedError(
            f"a tensor on {device} for worker {to!r}",
            "a device map that says where it goes",
            f"RpcBackendOptions.set_device_map({to!r}, {{{str(device)!r}: ...}}), or send"
            " tensor.cpu()",
        )
    return None if target.type == "cpu" else target.index or 0


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; for CUDA the copy may still be under way."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
