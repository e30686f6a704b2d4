import json

import pytest

from pibroch.errors import RemoteError, RpcTimeoutError
from pibroch.rpc.autograd.coordinator import as_runtime_error
from pibroch.rpc.info import WorkerInfo

BEN = WorkerInfo("ben", 3)


class Coded(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        OSError(2, "gone"),
        KeyError("bad"),
        Coded(7, "bad"),
        json.JSONDecodeError("bad", "", 0),
    ],
    ids=repr,
)
def test_an_error_becomes_a_runtime_error_and_stays_what_it_was(error):
    both = as_runtime_error(error, BEN)
    assert isinstance(both, RuntimeError) and both.__cause__ is error
    assert isinstance(both, (type(error), RemoteError))
    assert "Error on Node 3: " in str(both) and str(error) in str(both)


def test_runtime_errors_stay():
    for error in (RuntimeError("x"), RpcTimeoutError("late")):
        assert as_runtime_error(error, BEN) is error


def test_what_cannot_be_both_is_a_remote_error():
    assert type(as_runtime_error(Exception("bad"), BEN)) is RemoteError
