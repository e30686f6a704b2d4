"""The figures of a finished run; field names are those of ``summary.json``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures.

    Attributes:
        steps: updates, over all resumptions.
        samples: samples trained on, by all ranks.
        seconds: spent in training steps; evaluation, saving and compilation are not in it.
        samples_per_second: over these seconds.
        auc, logloss, normalized_entropy: of the test split, ``None`` where undefined or where there
            is none.
        exchange: how embeddings were exchanged.
        world_size: number of processes.
        bytes_sent, bytes_received: between ranks, summed over them, by the processes that ended the
            run; with what travels between ranks and servers or processors, both ways in both
            figures.
        cache_hit_rate: of the rows that ranks read, the share that was in their memory already;
            ``None`` without a cache.
        lookahead: steps in force, the mean over steps; ``None`` where the exchange does not look
            ahead.
        bytes_by_purpose: what ``bytes_sent`` was for, as far as is known; ``None`` without
            lookahead and processors.
        bytes_by_link: what each rank sent to each a training step to exchange embeddings, ``[W,
            W]``, in the steps of the processes that ended the run; ``None`` for one process, and
            for exchanges that do not count it.
        peak_rss_bytes: the most memory that one of the processes held.
        restarts: of processes of the run, or of all, because some were lost.
        timed_checkpoints: written beside training, by the processes that ended the run.
        timed_checkpoint_seconds: that these took from the thread that trains; they are within
            ``seconds``.
        memory_cuts, memory_cut_seconds: the same of cuts in memory.
        versions_published, publishing_seconds: the same of versions for servers.
    """

    steps: int
    samples: int
    seconds: float
    samples_per_second: float
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    exchange: str
    world_size: int
    bytes_sent: int
    bytes_received: int
    cache_hit_rate: float | None
    lookahead: float | None
    bytes_by_purpose: dict[str, int] | None
    bytes_by_link: list[list[float] | None] | None
    peak_rss_bytes: int
    restarts: int = 0
    timed_checkpoints: int = 0
    timed_checkpoint_seconds: float = 0.0
    memory_cuts: int = 0
    memory_cut_seconds: float = 0.0
    versions_published: int = 0
    publishing_seconds: float = 0.0
