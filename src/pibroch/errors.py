"""The exception tree. Every message says what was got, what is needed and what to do.

PibrochError
├── InputError            wrong usage or wrong input: the command line exits with 2
│   ├── ConfigError       a recipe, an option or an argument
│   ├── DataError         raw data, an encoded dataset or a batch
│   │   └── RowIdError    an id outside its table (names feature, sample and id)
│   └── CheckpointError   missing, damaged, or of another schema
├── TrainingError         a run that cannot go on: the command line exits with 1
│   ├── NonFiniteLossError
│   └── RankFailedError   another rank failed or was lost (names rank and step)
├── StorageError          the disk refused to take what had to be written
└── MissingDependencyError  an optional extra that is not installed
"""

from __future__ import annotations


class PibrochError(Exception):
    """Base of all errors that pibroch raises on purpose.

    Args:
        got: what was found, with the place where it was found.
        need: what would have been right.
        do: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, got: str, need: str = "", do: str = "") -> None:
        self.got, self.need, self.do = got, need, do
        parts = [f"got {got}"]
        parts += [f"need {need}"] if need else []
        parts += [f"do: {do}"] if do else []
        super().__init__("; ".join(parts))


class InputError(PibrochError):
    """Wrong usage or wrong input; nothing was changed."""

    exit_code = 2


class ConfigError(InputError):
    """A recipe, an option or an argument that cannot be used."""


class DataError(InputError):
    """Raw data, an encoded dataset or a batch that cannot be used."""


class RowIdError(DataError):
    """An id outside its table."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, or of another schema."""


class TrainingError(PibrochError):
    """A run that cannot go on."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite."""


class RankFailedError(TrainingError):
    """Another rank failed or was lost.

    Args:
        rank: which one.
        step: the step that it was in, ``None`` before the first.
        reason: what is known of the cause.
    """

    def __init__(self, rank: int, step: int | None, reason: str) -> None:
        self.rank, self.step = rank, step
        where = "before the first step" if step is None else f"in step {step}"
        super().__init__(
            f"rank {rank} failed {where}: {reason}",
            "all ranks",
            "see that rank's log; a training run goes on with --resume",
        )


class StorageError(PibrochError):
    """The disk refused to take what had to be written; what was there before is still whole."""

    exit_code = 2


class MissingDependencyError(PibrochError):
    """An optional extra that is not installed."""
