"""What runs a function that another worker called."""

import logging

import pytest

from pibroch.rpc import functions
from pibroch.rpc.functions import run
from pibroch.wire.bounded_log import BoundedLog


def fail():
    raise ValueError("on purpose")


def test_what_functions_raise_is_logged_at_a_bounded_rate(monkeypatch, caplog):
    monkeypatch.setattr(
        functions, "_failures_log", BoundedLog(functions.log, at_once=3, per_s=1e-9)
    )
    with caplog.at_level(logging.WARNING, logger="pibroch.rpc.functions"):
        for _ in range(100):
            with pytest.raises(ValueError, match="on purpose"):
                run(fail, "fail", [], {})
    assert [record.getMessage() for record in caplog.records] == [
        "fail, which another worker called, raised"
    ] * 3
    assert caplog.records[0].exc_info[0] is ValueError
