"""Which workers there are and where they listen.

Workers write a record into torch's store when they join, and look each other up there.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from urllib.parse import urlparse

import msgspec
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pibroch.errors import ConfigError, RpcError, RpcTimeoutError
from pibroch.host import is_loopback, this_machine
from pibroch.rpc.info import WorkerInfo
from pibroch.stores import tcp_store
from pibroch.wire.admit import Address

log = logging.getLogger(__name__)

# groups that this process has joined: a second group must not read the records of the first
_num_joined = 0
KILLED_S = 3.0  # the kernel closes a killed worker's socket within this time
PROBE_S = 1.0
_NUM_STATIC = "pibroch_rpc_static"
_NUM_DYNAMIC = "pibroch_rpc_dynamic"


class Record(msgspec.Struct, frozen=True):
    """A worker's entry in the store."""

    name: str
    id: int
    incarnation: int
    machine: str
    unix: str | None
    host: str
    port: int

    @property
    def info(self) -> WorkerInfo:
        """The worker's name and id."""
        return WorkerInfo(self.name, self.id)

    @property
    def address(self) -> Address:
        """Where the worker listens."""
        return Address(self.machine, self.unix, self.host, self.port)


class Rendezvous:
    """The store where workers meet, from an ``init_method``.

    Args:
        init_method: ``env://``, ``tcp://host:port`` (``?rank=…&world_size=…`` allowed) or
            ``file://path``.
        rank: of this worker, -1 when the method or the environment gives it.
        world_size: ``None`` or 0 for a group whose members come and go.
        timeout_s: how long to wait for the others.
        store: an existing store, which is used in place of ``init_method``.
    """

    def __init__(
        self,
        init_method: str,
        rank: int,
        world_size: int | None,
        timeout_s: float,
        store: Store | None = None,
    ) -> None:
        self._store = store
        if isinstance(store, TCPStore):
            init_method = f"tcp://{store.host}:{store.port}"
        elif store is not None:
            init_method = f"file://{getattr(store, 'path', '/')}"
        url = urlparse(init_method)
        parameters = dict(part.split("=", 1) for part in url.query.split("&") if "=" in part)
        self.timeout_s = timeout_s
        self._scheme = url.scheme
        self._path = url.path
        self._is_hosted = False
        if url.scheme == "env":
            parameters = {
                "rank": os.environ.get("RANK", "-1"),
                "world_size": os.environ.get("WORLD_SIZE", "0"),
            } | parameters
            host = os.environ.get("MASTER_ADDR")
            port = os.environ.get("MASTER_PORT")
            self._is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if host is None or port is None:
                raise ConfigError(
                    "no MASTER_ADDR or MASTER_PORT",
                    "both, for env://",
                    "export them, or use torchrun or tcp://host:port",
                )
        elif url.scheme == "tcp":
            host = url.hostname
            port = str(url.port or "")
        elif url.scheme == "file":
            host = "localhost"
            port = "0"
        else:
            raise ConfigError(
                f"init_method {init_method!r}", "env://, tcp://host:port or file://path"
            )
        if not host or not port.isdigit():
            raise ConfigError(f"init_method {init_method!r}", "a host and a port")
        self.host = host
        self.port = int(port)
        self.rank = rank if rank >= 0 else int(parameters.get("rank", -1))
        self.world_size = world_size or None
        if world_size is None and rank < 0:
            self.world_size = int(parameters.get("world_size", 0)) or None

    @property
    def is_loopback(self) -> bool:
        """Whether the rendezvous is on this machine alone."""
        return is_loopback(self.host)

    @property
    def key(self) -> str:
        """A name for the job, unique on this machine."""
        return f"{self.host}-{self.port}" if self.port else f"file{self._path.replace('/', '-')}"

    def store(self) -> Store:
        """The store; the worker with rank 0 hosts it unless the launcher or the user does."""
        if self._store is not None:
            return self._store
        timeout = timedelta(seconds=self.timeout_s)
        if self._scheme == "file":
            return FileStore(self._path, -1)
        is_host = self.rank == 0 and not self._is_hosted
        try:
            return tcp_store(self.host, self.port, is_host=is_host, timeout=timeout)
        except (dist.DistError, RuntimeError) as error:
            raise RpcError(
                f"no rendezvous at {self.host}:{self.port} ({str(error).splitlines()[0]})",
                "the worker with rank 0 there, within the timeout",
                "start it, and see MASTER_ADDR and MASTER_PORT",
            ) from error

    @property
    def is_hosted_by_a_worker(self) -> bool:
        """Whether the store ends with the worker of rank 0."""
        return self._scheme != "file" and not self._is_hosted and self._store is None

    def bind_host(self) -> str:
        """The address to listen on: loopback, or the interface that leads to the rendezvous."""
        if self.is_loopback:
            return "127.0.0.1"
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # connecting a datagram socket sends nothing
            probe.connect((self.host, self.port or 1))
            return str(probe.getsockname()[0])


class Membership:
    """The other workers' records, read from the store when first needed.

    Threads: used from any; the lock guards the records, and is not held during access to the store.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._prefix = (
            "pibroch_rpc" if rendezvous.world_size is None else f"pibroch_rpc_{_num_joined}"
        )
        self._store = self._open()
        self._is_counted = False  # in the store's count of static or dynamic groups
        self._me: Record | None = None
        self._records: dict[str, Record] = {}
        self._lost: dict[str, Record] = {}  # of workers that ended without a goodbye
        self._name_of_id: dict[int, str] = {}
        self.infos: dict[str | int, WorkerInfo] = {}  # of ``_records``, by name and by id
        self._lock = threading.Lock()

    def _open(self) -> PrefixStore:
        self._base = self._rendezvous.store()
        self._base.set_timeout(timedelta(seconds=self._rendezvous.timeout_s))
        return PrefixStore(self._prefix, self._base)

    def _write(self) -> None:
        assert self._me is not None
        self._store.set(f"worker/{self._me.name}", msgspec.json.encode(self._me).decode())
        self._store.set(f"id/{self._me.id}", self._me.name)

    def renew(self, lost: WorkerInfo) -> None:
        """Write this worker's record again if the lost worker hosted the store; blocks.

        Waits for the store to come back first.
        """
        if lost.id != 0 or not self._rendezvous.is_hosted_by_a_worker or self._me is None:
            return
        try:
            self._store = self._open()
            self._write()
        except RuntimeError as error:
            log.warning("the rendezvous did not come back, so nobody can join any more: %s", error)

    def new_id(self) -> int:
        """The next free id, for a worker without one."""
        return int(self._store.add("next_id", 1)) - 1

    def join(self, me: Record) -> None:
        """Write this worker's record, then wait for ``world_size`` workers, if it is given.

        Raises:
            MembershipError: when name or id belong to another worker, or the group is of the other
                kind (static or dynamic).
            RpcTimeoutError: when not all join in time.
        """
        global _num_joined
        self._check_free(me)
        self._check_kind(me)
        self._me = me
        self._write()
        if self._rendezvous.world_size is None:
            self._remember(me)
            return
        _num_joined += 1
        size = self._rendezvous.world_size
        names = self._get_all([f"id/{worker_id}" for worker_id in range(size)])
        for entry in self._get_all([f"worker/{name}" for name in names]):
            self._remember(msgspec.json.decode(entry, type=Record))

    def find(self, name: str) -> Record | None:
        """The worker of this name, ``None`` when there is none.

        Of a lost worker that has not come back, the last record.
        """
        record = self._records.get(name)
        if record is not None:
            return record
        lost = self._lost.get(name)
        try:
            if self._has(f"worker/{name}"):
                entry = self._get_all([f"worker/{name}"])[0]
                if entry:  # empty when the worker left after the check
                    return self._remember(msgspec.json.decode(entry, type=Record))
        except RpcError:
            if lost is None:
                raise
        return lost

    def find_id(self, worker_id: int) -> Record | None:
        """The worker with this id, ``None`` when there is none."""
        name = self._name_of_id.get(worker_id)
        if name is None and self._has(f"id/{worker_id}"):
            name = self._store.get(f"id/{worker_id}").decode()
        return self.find(name) if name is not None else None

    def workers(self) -> list[WorkerInfo]:
        """The workers whose records were read, in the order of their ids."""
        with self._lock:
            return sorted(set(self.infos.values()), key=lambda info: info.id)

    def forget(self, name: str, left: bool) -> None:
        """Forget the record of a worker that has ``left`` or was lost, so as to read it again."""
        with self._lock:
            record = self._records.pop(name, None)
            if record is not None:
                self.infos.pop(record.name, None)
                self.infos.pop(record.id, None)
                if not left:
                    self._lost[name] = record

    def leave(self, me: Record) -> None:
        """Delete this worker's record (in a group with a ``world_size`` it stays)."""
        if self._is_counted:
            self._count(-1)
        if self._rendezvous.world_size is None:
            self._store.delete_key(f"worker/{me.name}")
            self._store.delete_key(f"id/{me.id}")

    def _remember(self, record: Record) -> Record:
        with self._lock:
            self._records[record.name] = record
            self._lost.pop(record.name, None)
            self.infos[record.name] = self.infos[record.id] = record.info
            self._name_of_id[record.id] = record.name
        return record

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except (dist.DistError, RuntimeError) as error:
            raise RpcError(
                f"no answer from the rendezvous about {key!r}",
                "the process that opened it",
                "start it again; workers that know each other talk without it",
            ) from error

    def _get_all(self, keys: list[str]) -> list[str]:
        try:
            self._store.wait(keys, timedelta(seconds=self._rendezvous.timeout_s))
            if self._store.has_extended_api():  # type: ignore[attr-defined]
                return [value.decode() for value in self._store.multi_get(keys)]
            return [self._store.get(key).decode() for key in keys]
        except (dist.DistError, RuntimeError) as error:
            raise RpcTimeoutError(
                f"no sign of {self._missing(keys)} within {self._rendezvous.timeout_s:g} s",
                "all workers to join",
                "see its log; start it",
            ) from error

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = [key for key in keys if not self._store.check([key])]
        except (dist.DistError, RuntimeError):
            missing = keys
        return ", ".join("worker " + key.partition("/")[2] for key in missing[:8])

    def _check_free(self, me: Record) -> None:
        """Raise unless name and id are free, or belonged to a worker that is gone."""
        for key, what in (
            (f"worker/{me.name}", f"the name {me.name!r}"),
            (f"id/{me.id}", f"the id {me.id}"),
        ):
            if not self._store.check([key]):
                continue
            name = me.name if key.startswith("worker") else self._store.get(key).decode()
            before = msgspec.json.decode(self._get_all([f"worker/{name}"])[0], type=Record)
            if (before.name, before.id) != (me.name, me.id) or _goes_on_listening(before):
                got = f"{what}, which is not unique: worker {before.name!r} (id {before.id}) has it"
                raise MembershipError(got, "a free one", "choose another one, or stop that worker")

    def _check_kind(self, me: Record) -> None:
        """Refuse to mix workers with and without a ``world_size``, which would never meet."""
        is_static = self._rendezvous.world_size is not None
        if self._base.add(_NUM_DYNAMIC if is_static else _NUM_STATIC, 0):
            raise MembershipError(
                f"a worker with world_size {self._rendezvous.world_size} beside others (RPC group"
                " mixes statically and dynamically initialized members which is not supported.)",
                f"{'no' if is_static else 'the'} world_size, as the workers that are there",
                "give all the same, or let them meet elsewhere",
            )
        # worker 0 may host the store and leaves last, so it counts for all of a static group
        if not is_static or me.id == 0:
            self._count(1)

    def _count(self, change: int) -> None:
        key = _NUM_DYNAMIC if self._rendezvous.world_size is None else _NUM_STATIC
        self._is_counted = change > 0
        self._base.add(key, change)


class MembershipError(ConfigError, RuntimeError):
    """A name, an id or a group that is taken; a ``RuntimeError`` too, as in torch."""


def _goes_on_listening(record: Record) -> bool:
    """Whether a worker still listens after ``KILLED_S``: one that was just killed does not."""
    deadline = time.monotonic() + KILLED_S
    while _listens(record):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


def is_listening(record: Record) -> bool:
    """Whether a process listens at a record's address, here or on another machine.

    Blocks for a second at most.
    """
    if record.address.is_reached_locally(this_machine()):
        return _listens(record)
    try:
        socket.create_connection((record.host, record.port), PROBE_S).close()
    except OSError:
        return False
    return True


def _listens(record: Record) -> bool:
    """Whether a process listens at a record's Unix socket; without one it counts as gone."""
    if record.unix is None:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        return probe.connect_ex("\0" + record.unix) == 0
