"""Who needs which row when, where it is and what must travel. Plain objects: ids in, plans out."""

from pibroch.lookahead.oracle import DESIGNS, Opening, Oracle, StepPlan
from pibroch.lookahead.questions import Question, Questions

__all__ = ["DESIGNS", "Opening", "Oracle", "Question", "Questions", "StepPlan"]
