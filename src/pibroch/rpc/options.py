"""Options of a worker: calls, transport, trust. Torch's fields come first, further ones follow."""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pibroch.errors import ConfigError
from pibroch.wire.alive import LOST_HOST_S

DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_RPC_TIMEOUT_S = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_SHUTDOWN_TIMEOUT_S = 300.0
UNSET_RPC_TIMEOUT = -1.0

Device = int | str | torch.device


class BackendType(enum.Enum):
    """There is one backend; torch's name for its own stands for it, so that code moves."""

    PIBROCH = "PIBROCH"
    TENSORPIPE = "PIBROCH"


@dataclass(slots=True)
class Limits:
    """Bounds on what a peer may ask for; what exceeds them is refused with ``ProtocolError``.

    Attributes:
        metadata_bytes: of one message without its tensors.
        message_bytes: of one message's tensors; of those of all requests that a worker has under
            way here, and of the answers that it has not taken (those that are made at that moment
            come on top, one a thread).
        requests: that one worker may have under way here.
        waiting_strangers: connections that have not proved yet that they know the secret.
        handshake_s: time limit for that proof.
    """

    metadata_bytes: int = 16 << 20
    message_bytes: int = 16 << 30
    requests: int = 1 << 16
    waiting_strangers: int = 64
    handshake_s: float = 10.0


@dataclass(slots=True, kw_only=True)
class RpcBackendOptions:
    """Options of ``init_rpc``.

    Attributes:
        num_worker_threads: threads that run requests; more are started only while these wait for
            other workers.
        rpc_timeout: default timeout of a call in seconds, 0 for none.
        init_method: ``env://``, ``tcp://host:port`` or ``file://path``: where the workers find each
            other.
        store: a torch store to meet in, instead of ``init_method``.
        device_maps: per callee, from devices of this worker to devices of the callee.
        devices: devices used; follows from the maps when absent.
        allowed_modules: modules (and all below them) whose functions and types peers may name,
            beside the default ones.
        allow_pickle: send and accept values without a data form as pickles. Who knows the secret
            can then run any code here.
        secret: the job's; by default from ``PIBROCH_RPC_SECRET`` or ``PIBROCH_RPC_SECRET_FILE``; on
            one machine one is made.
        bind: address to listen on; by default loopback when the rendezvous is there, else the
            address by which it is reached.
        num_streams: TCP streams for large tensors between two hosts.
        shared_memory: use it between workers of one host.
        tls: paths of a certificate, its key and the authorities to trust (PEM), for TCP; ``None``
            for plain TCP.
        checksums: of all frames that this worker sends, which the others check; for hardware that
            is not trusted.
        lost_after_s: a host without a sign of life is given up after this time; a process that is
            stopped is waited for.
        limits: bounds on what peers may ask for.
    """

    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_S
    init_method: str = DEFAULT_INIT_METHOD
    store: Any = None
    device_maps: Any = None  # as given; then a dict[str, dict[torch.device, torch.device]]
    devices: Any = None  # as given; then a list[torch.device]
    allowed_modules: Sequence[str] = ()
    allow_pickle: bool = False
    secret: str | bytes | None = field(default=None, repr=False)
    bind: str | None = None
    num_streams: int = 2
    shared_memory: bool = True
    tls: tuple[str, str, str] | None = None
    checksums: bool = False
    lost_after_s: float = LOST_HOST_S
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._check()
        maps = dict(self.device_maps or {})
        devices = list(self.devices or [])
        self.device_maps = {}
        self.devices = []
        for to, device_map in maps.items():
            self.set_device_map(to, device_map)
        if devices:
            self.set_devices(devices)

    def _check(self) -> None:
        for name in ("num_worker_threads", "num_streams"):
            with suppress(TypeError):  # it is refused below
                setattr(self, name, operator.index(getattr(self, name)))
        for name in ("num_worker_threads", "num_streams", "rpc_timeout", "lost_after_s"):
            if not isinstance(getattr(self, name), (int, float)):
                got = f"{name} {getattr(self, name)!r} (incompatible constructor arguments)"
                raise RpcOptionTypeError(
                    got, "a number, of seconds where it is a time", "convert it"
                )
        if self.num_worker_threads < 1:
            raise RpcOptionError(f"num_worker_threads {self.num_worker_threads}", "at least 1")
        if self.rpc_timeout < 0:
            raise RpcOptionError(f"rpc_timeout {self.rpc_timeout}", "0 (none) or seconds")
        if self.num_streams < 0 or self.lost_after_s < 1:
            got = f"num_streams {self.num_streams}, lost_after_s {self.lost_after_s}"
            raise RpcOptionError(got, "0 or more streams, at least 1 s")

    def set_device_map(self, to: str, device_map: Mapping[Any, Device]) -> None:
        """Tensors sent to worker ``to`` from a device of the map's keys arrive on its value.

        Raises:
            ValueError: when a device is mapped twice, or two devices to one.
        """
        target_of = self.device_maps.setdefault(to, {})
        for own, others in device_map.items():
            source = torch.device(own)
            target = torch.device(others)
            if target_of.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, {source} already goes to"
                    f" {target_of[source]}"
                )
            if any(t == target and s != source for s, t in target_of.items()):
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, another device already goes to"
                    f" {target}"
                )
            target_of[source] = target

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the devices that this worker uses."""
        self.devices = [torch.device(device) for device in devices]


class RpcOptionError(ConfigError, RuntimeError):
    """An option that makes no sense; a ``RuntimeError`` too, as in torch."""


class RpcOptionTypeError(RpcOptionError, TypeError):
    """An option of a wrong type; a ``TypeError`` too."""


TensorPipeRpcBackendOptions = RpcBackendOptions
