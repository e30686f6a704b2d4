"""What is to run, as data: processes by role, what each needs, what follows when one is lost.

A job says nothing of how its processes are started: a launcher does that, on one machine, by
torchrun, or on a cluster. All that a launcher has to know is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pibroch.process import RENDEZVOUS

TRAINER = "trainer"
BEGUN = "config.toml"
"""What rank 0 writes into the run's folder before others may write there."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often something that was lost is started again.

    Attributes:
        most: so many times ...
        within_s: ... in so many seconds.
        after_any_end: whether an end with an exit code of its own counts as a loss, too; else only
            a signal does, and what says that it lost another one.
        or_without: whether, when all are used up, the others go on without it.
    """

    most: int = 0
    within_s: float = 3600.0
    after_any_end: bool = False
    or_without: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Processes of one role, numbered from 0.

    Attributes:
        role: its name: ``trainer``, or the command that starts processes of the role.
        title: of one in messages, before its number.
        count: how many there are.
        command: arguments of ``pibroch``, the same for all.
        is_numbered: whether ``--number N`` follows them.
        environment: variables that they have besides the launcher's own.
        are_ranks: whether they form torch's group: they have the variables that torchrun sets, and
            the job is done when all have ended with 0. Others stay until they are stopped.
        needs: roles whose number 0 must have begun, and listen where all meet, before these start.
        restarts: of one alone, while the others go on; when absent all start again.
        again: arguments that follow the others once the job was started before.
        threads: of each one's kernels, where that is known.
        logs: folder in the job's for what they say, a file for each number; without one they speak
            where the launcher does.
    """

    role: str
    title: str
    count: int
    command: tuple[str, ...]
    is_numbered: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    are_ranks: bool = False
    needs: tuple[str, ...] = ()
    restarts: Restarts | None = None
    again: tuple[str, ...] = ()
    threads: int | None = None
    logs: str | None = None

    def arguments(self, number: int, is_again: bool = False) -> list[str]:
        """The command line of one, without the program's name."""
        own = ["--number", str(number)] if self.is_numbered else []
        return [*self.command, *own, *(self.again if is_again else ())]


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes of a job meet.

    Attributes:
        host: rank 0's, as all others reach it.
        port: where rank 0 opens torch's store.
        rendezvous: ``tcp://host:port`` where ranks meet the others, opened by rank 0, unless the
            job names another.
    """

    host: str
    port: int
    rendezvous: str


@dataclass(frozen=True, slots=True)
class Job:
    """Processes that run together.

    Attributes:
        groups: by role.
        folder: of the run, in which logs are.
        restarts: of all, when one is lost that cannot be started again alone.
        least_ranks: with how many to go on where more get no further; always all when absent.
        rendezvous: where those are met that run elsewhere already, and with them all.
        stop_s: how long ranks may take to end when all are told to stop.
    """

    groups: tuple[Group, ...]
    folder: str | None = None
    restarts: Restarts = Restarts()
    least_ranks: int | None = None
    rendezvous: str | None = None
    stop_s: float = 5.0

    @property
    def num_ranks(self) -> int:
        """How many processes form torch's group."""
        return sum(group.count for group in self.groups if group.are_ranks)

    def with_ranks(self, count: int) -> Job:
        """The same with so many ranks."""
        groups = (replace(each, count=count) if each.are_ranks else each for each in self.groups)
        return replace(self, groups=tuple(groups))


def variables(
    job: Job, group: Group, number: int, place: Place, ranks_here: range | None = None
) -> dict[str, str]:
    """The environment of a process, besides what its machine and its launcher add.

    Args:
        job: the whole.
        group: the process's.
        number: in its group.
        place: where all meet.
        ranks_here: ranks on the process's machine; all when absent.

    Example:
        >>> trainers = Group("trainer", "rank", 2, ("train",), are_ranks=True)
        >>> job = Job((trainers, Group("oracle", "oracle", 1, ("oracle",), needs=("trainer",))))
        >>> place = Place("127.0.0.1", 29500, "tcp://127.0.0.1:29700")
        >>> variables(job, job.groups[1], 0, place)
        {'PIBROCH_RENDEZVOUS': 'tcp://127.0.0.1:29700'}
        >>> variables(job, trainers, 1, place)["RANK"]
        '1'
    """
    result = dict(group.environment)
    if any(each.needs for each in job.groups):
        result[RENDEZVOUS] = job.rendezvous or place.rendezvous
    if group.are_ranks:
        here = ranks_here or range(job.num_ranks)
        result |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number - here.start),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
        }
    return result
