"""What a launcher is, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol

from pibroch.config.base import Section
from pibroch.config.registry import Registry, Spec
from pibroch.launch.job import Job


class Run(Protocol):
    """What is launched: asked for its job, and told what happens to it."""

    program: Callable[[], NoReturn] | None
    """The command line, by ``sys.argv`` and the environment, for processes that are forked."""

    def job(self, is_here: bool) -> Job:
        """Its processes; wrong input is an error here.

        Under a launcher that has processes already, the first of them alone asks.

        Args:
            is_here: whether all share the processors of this machine.
        """

    def be_rank(self) -> None:
        """Be a rank in this process, to the end."""

    def newest_step(self, kept: Callable[[int], list[bytes]] | None) -> int:
        """From which it would go on.

        Args:
            kept: gives the first bytes of each piece of memory that outlived its processes.
        """

    def note_restart(self, reason: str, from_step: int | None, pause_seconds: float = 0.0) -> None:
        """Keep that something was lost and is started again, see ``RunDirectory``."""

    def log_path(self, rank: int) -> Path:
        """What a rank that is not the first says."""

    def say(self, text: str) -> None:
        """Tell the user."""


class RaySection(Section):
    """Which cluster of Ray.

    Attributes:
        address: as ``ray.init`` takes it; that of a cluster which this machine is part of when
            absent.
    """

    address: str = "auto"


class Launcher(ABC):
    """Starts the processes of a job, and looks after them, as its section of settings says."""

    section: ClassVar[type[Section]] = Section

    def __init__(self, section: Section) -> None:
        self._section = section

    @abstractmethod
    def run(self, run: Run) -> int:
        """Launch; blocks until the end, which the exit code says."""


LOCAL = Spec("local", "on this machine, forked", Section, "pibroch.launch.local:LocalLauncher")
TORCHRUN = Spec(
    "torchrun",
    "processes that torchrun has started share the roles out",
    Section,
    "pibroch.launch.torchrun:TorchrunLauncher",
)
RAY = Spec("ray", "on a cluster of Ray", RaySection, "pibroch.launch.ray:RayLauncher")
LAUNCHERS = Registry(
    "launcher",
    "pibroch.launchers",
    Spec,
    "pibroch.launch.base:Launcher",
    [f"pibroch.launch.base:{name}" for name in ("LOCAL", "TORCHRUN", "RAY")],
)
find_launcher = LAUNCHERS.find
launchers = LAUNCHERS.all
