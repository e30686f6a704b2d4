"""What a machine takes for what ranks do: a file, measured here or from published rates.

Costs are physical: seconds a call, an id, a row, a byte of what
:data:`pibroch.sim.operation.FEATURES` counts; seconds a message; bytes a second.
"""

from __future__ import annotations

import os
import platform
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from pibroch.errors import ConfigError
from pibroch.sim.operation import FEATURES, Operation
from pibroch.storage import new_file
from pibroch.untrusted import Refusal, checked, parse_json

_REFUSAL = Refusal(ConfigError, "check the path, or make one with `pibroch simulate calibrate`")
Floats = NDArray[np.float64]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PartCost(_Part):
    """Seconds of CPU that a part of an operation takes, by what it is about."""

    call: float = Field(default=0.0, ge=0)
    ids: float = Field(default=0.0, ge=0)
    rows_in: float = Field(default=0.0, ge=0)
    bytes_in: float = Field(default=0.0, ge=0)
    rows_out: float = Field(default=0.0, ge=0)
    bytes_out: float = Field(default=0.0, ge=0)

    def seconds(self, features: Floats) -> Floats:
        """Of parts with these features, ``[W, len(FEATURES)]``."""
        costs = np.array([getattr(self, name) for name in FEATURES])
        seconds: Floats = self.call + features @ costs
        return seconds


class DenseCost(_Part):
    """Seconds of a dense model's step: so much, and so much a sample.

    Attributes:
        begin: before it asks for embeddings.
        forward: from then to the loss.
        backward: until the gradient of the embeddings is there.
        rest: of the backward pass.
        optimizer: of the dense layers; by the step alone.
        flops: operations a sample, see :mod:`pibroch.models.flops`.
        early_bytes: of gradients whose sums begin before that of the embeddings is there.
        late_bytes: and of the others.
        towers_forward, towers_backward: of these times what the model's towers take.
    """

    begin: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    rest: tuple[float, float]
    optimizer: float
    flops: float
    early_bytes: int
    late_bytes: int
    towers_forward: tuple[float, float] = (0.0, 0.0)
    towers_backward: tuple[float, float] = (0.0, 0.0)

    @property
    def parts(self) -> tuple[tuple[float, float], ...]:
        """All that takes time by the sample."""
        return self.begin, self.forward, self.backward, self.rest


class Link(_Part):
    """What carries messages.

    Attributes:
        bytes_per_second: each way; of a network it is what the command line says.
        message_s: from the last rank's call to the first byte, of each round of messages.
        wait_s: of the thread that waits for them, from the last byte until it has a core and the
            interpreter, the mean of all ranks; once, as rounds follow each other without it.
        call_cpu_s: seconds of CPU of a rank for a message to another one and one from it.
        byte_cpu_s: for a byte that it sends, and another for one that comes.
        wire_share: bytes of payload for each byte that the link carries.
        contention: share of its time that is lost where all its flows compete with others at their
            other ends.
    """

    bytes_per_second: float | None = Field(default=None, gt=0)
    message_s: float = Field(default=0.0, ge=0)
    wait_s: float = Field(default=0.0, ge=0)
    call_cpu_s: float = Field(default=0.0, ge=0)
    byte_cpu_s: float = Field(default=0.0, ge=0)
    wire_share: float = Field(default=1.0, gt=0, le=1)
    contention: float = Field(default=0.0, ge=0, lt=1)


class Accelerator(_Part):
    """Published rates of a device that computes.

    Attributes:
        flops: operations a second of matrix products, in the type of training.
        memory_bytes_per_second: of its memory.
        memory_bytes: of it.
    """

    flops: float = Field(gt=0)
    memory_bytes_per_second: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)


class Machine(_Part):
    """A calibration file.

    Attributes:
        name: of the machine, or of the device.
        cpu, cores: what it computes with; one rank's accelerator counts as one core.
        versions: of what was measured.
        measured_at: when, with a time zone; ``None`` where nobody noted it.
        sources: where published figures come from; empty for a machine that was measured.
        operations: costs of their parts, by name.
        dense: costs of models, by :func:`model_key`.
        flops_per_second: of a rank's dense layers, for models that are not there.
        network, memory: links between hosts, and within one.
        links: named local links, bytes a second, for ``--local``.
        slowdown: how much longer work takes within a step than by itself, see
            :mod:`pibroch.sim.whole_steps`.
        jitter: spread of the times of a dense step's parts: standard deviation of their logarithm.
        process_bytes: of a rank without any rows, once its libraries and kernels have run.
        running_bytes: of these, what is there beyond imports.
        accelerator: published rates; ``None`` for a machine that was measured.
    """

    format: Literal["pibroch-machine"] = "pibroch-machine"
    version: Literal[1] = 1
    name: str
    cpu: str
    cores: int = Field(ge=1)
    versions: dict[str, str] = {}
    measured_at: AwareDatetime | None = None
    sources: list[str] = []
    operations: dict[str, list[PartCost]] = {}
    dense: dict[str, DenseCost] = {}
    flops_per_second: float = Field(gt=0)
    slowdown: float = Field(default=1.0, gt=0)
    jitter: float = Field(default=0.0, ge=0, le=2)
    network: Link = Link()
    memory: Link = Link()
    links: dict[str, float] = {}
    process_bytes: float = Field(default=0.0, ge=0)
    running_bytes: float = Field(default=0.0, ge=0)
    accelerator: Accelerator | None = None

    @classmethod
    def load(cls, name_or_path: str) -> Machine:
        """A file, or one that ships by its name.

        Raises:
            ConfigError: when there is none, or it is of another kind.
        """
        path = Path(name_or_path)
        shipped = files("pibroch.sim") / "machines" / f"{name_or_path}.json"
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        elif shipped.is_file():
            text = shipped.read_text(encoding="utf-8")
        else:
            raise ConfigError(
                f"calibration {name_or_path!r}",
                f"a file, or one of {', '.join(shipped_machines())}",
                "make one with `pibroch simulate calibrate --output FILE`",
            )
        content = parse_json(text.encode(), str(path), _REFUSAL)
        machine: Machine = checked(cls, content, str(path), _REFUSAL)
        return machine

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            StorageError: when the disk refuses.
        """
        with new_file(path, do="pass --output FILE") as file:
            file.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def cost(self, operation: str, part: int, features: Floats) -> Floats | None:
        """Seconds of a part of an operation for each rank; ``None`` where the file has none.

        An accelerator takes what its memory takes for the bytes, read once and written once.
        """
        if self.accelerator is not None:
            num_bytes = features[:, 2] + features[:, 4] + ID_BYTES * features[:, 0]
            seconds: Floats = 2 * num_bytes / self.accelerator.memory_bytes_per_second
            return seconds
        parts = self.operations.get(operation)
        return None if parts is None else parts[min(part, len(parts) - 1)].seconds(features)

    def knows(self, operation: Operation) -> bool:
        """Whether it says what an operation takes."""
        return self.accelerator is not None or (
            operation.is_known and operation.name in self.operations
        )

    @property
    def is_here(self) -> bool:
        """Whether it is a measurement of a machine like this one."""
        return (self.cpu, self.cores) == (cpu_model(), num_cores())


ID_BYTES = 8


def shipped_machines() -> list[str]:
    """Names of the calibration files that ship."""
    folder = files("pibroch.sim") / "machines"
    return sorted(each.name.removesuffix(".json") for each in folder.iterdir())


def cpu_model() -> str:
    """Of this machine, as its system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
