"""Which rank trains which sample of a global batch: ``exchange.assign = "rows"``.

See docs/lookahead.md, and docs/design/0036-assignment.md for why it is as it is.
"""

from pibroch.assignment.assigner import Assigner, RowAssigner, Verdict
from pibroch.assignment.rows_of import RowsOf
from pibroch.assignment.schedule import RankPart, RankSchedule, Schedule

__all__ = [
    "Assigner",
    "RankPart",
    "RankSchedule",
    "RowAssigner",
    "RowsOf",
    "Schedule",
    "Verdict",
]
