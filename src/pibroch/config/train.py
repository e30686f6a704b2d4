"""The training loop's own settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pibroch.config.base import Section


class WindowsConfig(Section):
    """The ``[train.windows]`` table: what predictions are worth before their step trains.

    By windows of event time, see :mod:`pibroch.train.windows`.

    Attributes:
        seconds: of event time in a window.
        lateness_seconds: for which a window stays open after an event has passed its end.
        ahead_seconds: by which an event may be ahead of all others, and the time be believed.
        auc: an alarm is raised for a window whose AUC is outside; none when absent.
        calibration: likewise, predicted over observed clicks.
        least_samples: of a window, for an alarm.
    """

    seconds: float = Field(default=60.0, ge=0.001, le=1e9)
    lateness_seconds: float = Field(default=10.0, ge=0, le=1e9)
    ahead_seconds: float = Field(default=86_400.0, ge=0.001, le=1e9)
    auc: tuple[float, float] | None = None
    calibration: tuple[float, float] | None = None
    least_samples: int = Field(default=1000, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.lateness_seconds > 100 * self.seconds:
            raise ValueError("`lateness_seconds` of at most 100 windows")
        return self

    def problems(self, num_samples: int, auc: float, calibration: float) -> list[str]:
        """Which figures of a window are outside their bands; NaN is outside of none.

        >>> WindowsConfig(calibration=(0.9, 1.1)).problems(5000, 0.7, 1.25)
        ['calibration 1.2500, outside 0.9 to 1.1']
        """
        bands = (("AUC", auc, self.auc), ("calibration", calibration, self.calibration))
        return [
            f"{name} {value:.4f}, outside {band[0]:g} to {band[1]:g}"
            for name, value, band in bands
            if num_samples >= self.least_samples
            and band is not None
            and (value < band[0] or value > band[1])
        ]


class TrainConfig(Section):
    """The ``[train]`` table; intervals count steps.

    Attributes:
        epochs: passes over the training split; one of ``epochs`` and ``steps`` is needed. A stream
            has none: ``epochs`` is then not looked at, and without ``steps`` there is no end.
        steps: stop after this many steps instead.
        batch_size: samples a step, over all ranks.
        accumulate: so many times ``batch_size`` samples make a step, in as many passes through the
            dense layers: one update of them and of each row, as of one large batch.
        evaluate_batch_size: samples a batch when evaluating, over all ranks.
        evaluate_every: validation interval; the end of each epoch when absent.
        evaluate_test: whether the run reads the test split, to evaluate its best model at the end.
        early_stop_patience: stop after this many evaluations in a row without improvement.
        monitor: the figure that says which model is best, as ``auc``, or ``LABEL:auc`` of another
            label than the first; where samples have weights ``auc_unweighted`` is without them.
        top_k: the k of figures over the best k samples of a group, as ``ndcg@k``.
        items: a file of all items, among which ``all_hr@k`` and ``all_ndcg@k`` look: Parquet, or
            CSV with a header, a row an item with the columns of its features. When absent all items
            of the training split, those of histories among them.
        leave_out_seen: leave items that a sample's group had in the splits before its own or in the
            sample's history, such as a user's own clicks, out of ``all_hr@k`` and ``all_ndcg@k``;
            the schema names the group.
        clip_norm: bound on the norm of all dense gradients together.
        average: decay a step of moving averages of all weights, which are then what is evaluated
            and served.
        bf16: run the dense layers under bfloat16 autocast.
        checkpoint_every: interval of checkpoints; the end of each epoch when absent.
        checkpoint_every_seconds: interval of the checkpoints that are written beside training, for
            going on alone; 0 for none.
        cut_every_seconds: interval of the cuts in memory, from which a run whose launcher starts it
            again goes on; chosen from what they cost when absent, 0 for none.
        full_checkpoint_every: every how many-th checkpoint is full; those between share the last
            full one's files and add the rows that changed since.
        keep: newest checkpoints to keep, besides the best one.
        log_every: interval of progress and metrics records.
        log_lost_ids: keep which ids of tables of raw ids were evicted or expired in which step, as
            Parquet files in ``lost_ids/`` of the run directory.
        replan_above: under a plan by rows, plan anew where it costs this many times what a fresh
            plan would, and let rows move while training goes on; never when absent. No number of a
            run depends on it.
        publish_to: a folder to which the run writes numbered exports and deltas beside training,
            for ``pibroch serve``; none when absent.
        publish_every_seconds: interval between two of them.
        publish_dtype: of their rows, see ``pibroch export``.
        publish_compact_every: after so many deltas a whole export follows.
        publish_keep_seconds: how long an export and its deltas stay at least after the next whole
            one has come; the newest two stay in any case.
        windows: what predictions are worth before their step trains, by windows of event time; none
            when absent.
        threads: CPU threads of a process; when absent all that it may use, divided by the ranks on
            its machine.
    """

    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=1024, ge=1)
    accumulate: int = Field(default=1, ge=1)
    evaluate_batch_size: int = Field(default=8192, ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)
    evaluate_test: bool = True
    early_stop_patience: int | None = Field(default=None, ge=1)
    monitor: str = "auc"
    top_k: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = (10,)
    items: str | None = None
    leave_out_seen: bool = False
    clip_norm: float | None = Field(default=None, gt=0)
    average: float | None = Field(default=None, ge=0, lt=1)
    bf16: bool = False
    checkpoint_every: int | None = Field(default=None, ge=1)
    checkpoint_every_seconds: float = Field(default=60.0, ge=0)
    cut_every_seconds: float | None = Field(default=None, ge=0)
    full_checkpoint_every: int = Field(default=1, ge=1)
    keep: int = Field(default=2, ge=1)
    log_every: int = Field(default=50, ge=1)
    log_lost_ids: bool = False
    replan_above: float | None = Field(default=None, gt=1)
    publish_to: str | None = None
    publish_every_seconds: float = Field(default=60.0, gt=0)
    publish_dtype: Literal["float32", "float16", "int8"] = "float32"
    publish_compact_every: int = Field(default=20, ge=1, le=200)
    publish_keep_seconds: float = Field(default=300.0, ge=0)
    windows: WindowsConfig | None = None
    threads: int | None = Field(default=None, ge=1)

    @property
    def samples_per_step(self) -> int:
        """Over all ranks."""
        return self.batch_size * self.accumulate
