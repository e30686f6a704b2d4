"""What a process beside the trainers can be."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_NUMBER = 1 << 20
"""Of processes of one role."""
FIRST_TRAINER_ID = LARGEST_NUMBER


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process that serves trainers.

    Attributes:
        title: as messages call one.
        worker: its name in the RPC group, before its number.
        command: of the command line, that starts one.
        functions: the module whose functions others may call there, and no other.
        first_id: number 0's id in the RPC group.
        folder: of a run's directory, for what they say.
    """

    title: str
    worker: str
    command: str
    functions: str
    first_id: int
    folder: str

    def name(self, number: int) -> str:
        """The worker that number ``number`` is."""
        return f"{self.worker}{number}"


EMBEDDING_SERVER = Role("embedding server", "embedding", "embedding-server", "pibroch.servers.server", 0, "servers")
ORACLE = Role("oracle", "oracle", "oracle", "pibroch.servers.plan_service", 3 * LARGEST_NUMBER, "oracle")
"""One at most: number 0."""
DATA_PROCESSOR = Role(
    "data processor", "processor", "data-processor", "pibroch.processors.processor", 2 * LARGEST_NUMBER, "processors"
)
ROLES = (EMBEDDING_SERVER, ORACLE, DATA_PROCESSOR)
"""In the order of their ranks, behind the trainers, where a launcher starts them all."""
