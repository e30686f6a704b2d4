"""The order of a training step as data, and what runs it."""

from pibroch.exchange.schedule.runner import Run, Runner, ScheduledStep, Thread
from pibroch.exchange.schedule.schedule import FAR_AHEAD, Moment, Queue, Schedule, Task

__all__ = [
    "FAR_AHEAD",
    "Moment",
    "Queue",
    "Run",
    "Runner",
    "Schedule",
    "ScheduledStep",
    "Task",
    "Thread",
]
