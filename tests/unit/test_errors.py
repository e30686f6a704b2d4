"""Errors say the same in another process, and as copies."""

import copy
import inspect
import pickle

import pytest

from pibroch import errors
from pibroch.rpc.info import WorkerNameError

CLASSES = [
    each
    for each in (*vars(errors).values(), WorkerNameError)
    if isinstance(each, type) and issubclass(each, errors.PibrochError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("carry", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_message_is_not_wrapped_again(cls, carry):
    error = cls(*["this", "that", "so"][: len(inspect.signature(cls).parameters)])
    error.place = 3
    carried = carry(carry(error))
    assert type(carried) is cls and str(carried) == str(error)
    assert vars(carried) == vars(error) and carried.args == error.args
