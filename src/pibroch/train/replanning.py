"""A run that follows its data.

The plan is watched, planned anew where it has decayed, and rows move while training goes on.

Rank 0 watches its own part of each batch, plans on a thread of its own, and tells the others
between two steps. No number of the run depends on it: not on when a plan is ready, nor on whether
the run is killed while rows move.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError
from pibroch.planner import Plan
from pibroch.planner.drift import Decay, DriftWatch
from pibroch.planner.make import PlanOptions
from pibroch.planner.partition import sizes_of
from pibroch.planner.replicate import as_mode, as_policy
from pibroch.planner.store import load_plan
from pibroch.planner.topology import ClusterTopology
from pibroch.planner.watch import ids_by_table
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import Session

logger = logging.getLogger(__name__)
STEPS_PER_LOOK = 25
STEPS_PER_WORD = 5
"""Steps between two checks of the plan, and between two reports of rank 0 to the others."""
MOST_STEPS_OF_A_MOVE = 200
"""A move takes about as many steps, where rows are many.

The fewer rows a step, the less a step is slowed down.
"""


class Replanner:
    """Every rank of a session has one, and all call it at the same place.

    Args:
        session: trains under a plan by rows.
        run: where new plans are written, and what was found of the old ones: ``plan_decay.json``.
        above: the cost of a fresh plan, times this, above which a plan has decayed.

    Raises:
        ConfigError: for a session whose rows have no plan by rows, or do not move.
    """

    def __init__(self, session: Session, run: RunDirectory, above: float) -> None:
        self._session = session
        self._run = run
        self._above = above
        section = session.config.embedding.exchange.for_ranks(session.world.ranks.world_size)
        path = getattr(section, "plan", None)
        if (
            path is None
            or section.name not in ("alltoall", "retrieve", "lookahead")
            or section.helpers()
        ):
            raise ConfigError(
                f"train.replan_above with embedding.exchange {section.name!r} and plan {path!r}",
                "alltoall, retrieve, or lookahead without servers and central oracle, under a"
                " plan by rows",
                "make one with `pibroch plan --mode training`",
            )
        if session.embeddings.exchange.rows_of is not None:
            raise ConfigError(
                "train.replan_above where samples are assigned by where rows are",
                "rows that stay, or samples that stay as they are given",
                "leave one of train.replan_above and embedding.exchange.assign out",
            )
        self._features = {table.name: table.features for table in session.embeddings.tables}
        num_rows = sum(table.num_rows for table in session.embeddings.tables)
        self._rows_per_step = max(
            1024, num_rows // (session.world.ranks.world_size * MOST_STEPS_OF_A_MOVE)
        )
        self._watch = self._watch_over(Path(path)) if session.world.is_first else None
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="pibroch-replan")
        self._found: Future[Decay] | None = None
        self._looks: list[dict[str, float | str | None]] = []
        self._is_moving = False

    def after_step(self, step: int, batch: JaggedBatch) -> None:
        """Watch a batch that was trained on; now and then let rows move."""
        if self._is_moving and not self._session.embeddings.is_moving:
            self._is_moving = False
            self._note_arrival(step)
        if self._watch is not None:
            indices = self._session.embeddings.row_indices
            rows = {
                table: [indices[table].rows_of(ids) for ids in each]
                for table, each in ids_by_table(batch, self._features).items()
            }
            rows = {table: [ids[ids >= 0] for ids in each] for table, each in rows.items()}
            self._watch.add(rows, batch.batch_size)
            idle = self._found is None and not self._session.embeddings.is_moving
            if idle and step % STEPS_PER_LOOK == 0 and self._watch.num_batches >= STEPS_PER_LOOK:
                self._found = self._planner.submit(self._watch.look, self._watch.profiles())
        if step % STEPS_PER_WORD == 0:
            new_plan: str | None = self._session.world.control.gather(self._decide(step))[0]
            if new_plan is not None:
                self._session.embeddings.move_rows(Plan.load(Path(new_plan)), self._rows_per_step)
                self._is_moving = True

    def close(self) -> None:
        """Let the planning thread end."""
        self._planner.shutdown(wait=True, cancel_futures=True)

    def _watch_over(self, path: Path) -> DriftWatch:
        assignment, prediction = load_plan(path)
        mode = as_mode(prediction.mode)
        options = PlanOptions(
            extra=prediction.extra, mode=mode, policy=as_policy(prediction.policy), steps=False
        )
        session = self._session
        sizes = sizes_of(
            session.embeddings.tables, session.embeddings.optimizers if mode == "training" else None
        )
        topology = ClusterTopology.of({"host_of_rank": list(prediction.hosts)}, str(path))
        num_ranks = session.world.ranks.world_size
        batch_size = max(1, session.config.train.samples_per_step // num_ranks)
        return DriftWatch(assignment, sizes, topology, options, batch_size)

    def _decide(self, step: int) -> str | None:
        """The file of a new plan, if there is to be one."""
        if self._watch is None or self._found is None or not self._found.done():
            return None
        decay = self._found.result()
        self._found = None
        path: Path | None = None
        if decay.ratio > self._above:
            path = self._run.path / "plans" / f"step{step}.json"
            path.parent.mkdir(exist_ok=True)
            Plan.by_rows(decay.assignment).save(path)
            self._watch.assignment = decay.assignment
            how = "step %d: the plan costs %.2f times a fresh one; rows move to %s"
            logger.info(how, step, decay.ratio, path)
        look = {
            "step": step,
            "current": decay.current,
            "fresh": decay.fresh,
            "moved_to": None if path is None else path.name,
            "in_force_after": None,
        }
        self._looks.append(look)
        self._run.note_json("plan_decay.json", self._looks)
        return None if path is None else str(path)

    def _note_arrival(self, step: int) -> None:
        """All rows are at their homes under the plan of the last look."""
        if self._watch is not None:
            self._looks[-1]["in_force_after"] = step
            self._run.note_json("plan_decay.json", self._looks)
            logger.info("step %d: all rows have moved", step)
