"""Exceptions over the wire and back."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch import errors
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.failures import (
    MAX_MESSAGE_LENGTH,
    MAX_TRACEBACK_LENGTH,
    Failure,
    RemoteTraceback,
    decode_failure,
    encode_failure,
    error_of,
    failure_of,
)

JSON = st.recursive(
    st.none() | st.integers(-5, 2**63) | st.text(max_size=10) | st.binary(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
BEN = WorkerInfo("ben", 3)
constructed: list = []


class TwoArguments(Exception):
    """Cannot be built from its own ``args``."""

    def __init__(self, code, text):
        constructed.append(code)
        self.code = code
        self.text = text
        super().__init__(f"{code}: {text}")


class OwnText(ValueError):
    def __str__(self):
        return f"<{self.args[0]}>"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


class HoldsTensor(Exception):
    def __init__(self, tensor):
        self.tensor = tensor
        super().__init__("a tensor")


class NotAnError:
    pass


class __Private(Exception):
    pass


def there_and_back(error, allowed=(__name__,)):
    """The error as its caller gets it, through bytes."""
    try:
        raise error
    except BaseException as raised:
        data = encode_failure(raised)
    return decode_failure(data, BEN, Callables(allowed))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("expected"),
        ValueError(),
        ValueError("two", 2),
        KeyError("key"),
        KeyError(("a", 1)),
        KeyError(3),
        IndexError("out"),
        ZeroDivisionError("division by zero"),
        OSError(2, "No such file or directory"),
        FileNotFoundError(2, "No such file or directory", "/nowhere"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        AssertionError(),
        NotImplementedError("abstract"),
        StopIteration(5),
        TimeoutError("late"),
        RuntimeError("line\nline"),
        RuntimeError("a lone surrogate has no UTF-8 form" + " \u2713"),
        torch.linalg.LinAlgError("singular"),  # type: ignore[attr-defined]  # torch does not export it by name
        torch.OutOfMemoryError("no memory"),
        errors.ConfigError("this", "that", "do it"),
        errors.WorkerLostError("carl", "it ended"),
        errors.RankFailedError(1, None, "lost"),
        errors.RpcTimeoutError("nothing in 5 s"),
        TwoArguments(5, "text"),
        OwnText("inside"),
        HoldsTensor(torch.ones(2)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_message_and_arguments_come_back(error):
    back = there_and_back(error)
    assert type(back) is type(error) and str(back) == str(error)
    assert len(back.args) == len(error.args)


def test_attributes_come_back_and_the_constructor_did_not_run():
    constructed.clear()
    error = TwoArguments(5, "text")
    back = there_and_back(error)
    assert (back.code, back.text) == (5, "text") and constructed == [5]
    back = there_and_back(errors.RankFailedError(1, 7, "lost"))
    assert (back.rank, back.step) == (1, 7)
    back = there_and_back(errors.ConfigError("this", "that", "do it"))
    assert (back.got, back.need, back.do) == ("this", "that", "do it")
    back = there_and_back(FileNotFoundError(2, "No such file", "/nowhere"))
    assert (back.errno, back.filename) == (2, "/nowhere")


def test_the_cause_shows_the_callees_traceback():
    back = there_and_back(ValueError("expected"))
    assert isinstance(back.__cause__, RemoteTraceback)
    text = str(back.__cause__)
    assert text.startswith("On worker ben (id 3):\nTraceback (most recent call last):\n")
    assert "in there_and_back" in text and text.endswith("ValueError: expected")


def inner():
    raise KeyError("cause")


def test_the_causes_of_an_error_are_in_its_traceback():
    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError("effect") from error
    except ValueError as error:
        failure = failure_of(error)
    assert "KeyError: 'cause'" in failure.traceback and "direct cause" in failure.traceback


@pytest.mark.parametrize(
    "error",
    [__Private("hidden"), SystemExit(3), KeyboardInterrupt(), Unprintable("x")],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_built_comes_as_a_remote_error_that_names_it(error):
    back = there_and_back(error)
    assert (
        type(back) is errors.RemoteError
        and type(error).__qualname__ in str(back)
        and "'ben'" in str(back)
    )


def test_a_class_of_a_module_that_is_not_allowed_comes_as_a_remote_error():
    back = there_and_back(TwoArguments(5, "text"), allowed=("elsewhere",))
    assert type(back) is errors.RemoteError and "TwoArguments on worker 'ben': 5: text" in str(back)


def test_a_class_made_inside_a_function_comes_as_a_remote_error():
    class Local(Exception):
        pass

    assert type(there_and_back(Local("x"))) is errors.RemoteError


@pytest.mark.parametrize("name", ["NotAnError", "inner", "there_and_back", "nothing"])
def test_only_exceptions_are_built(name):
    back = error_of(Failure(f"{__name__}:{name}", "text", ["text"]), BEN, Callables((__name__,)))
    assert type(back) is errors.RemoteError


@pytest.mark.parametrize(
    "name", ["builtins:eval", "builtins:SystemExit", "builtins:BaseException", "os:error", "", "x:"]
)
def test_nothing_else_is_built_by_name(name):
    back = error_of(Failure(name, "1+1", ["1+1"]), BEN, Callables((__name__,)))
    assert type(back) is errors.RemoteError


def test_everything_is_bounded():
    failure = failure_of(ValueError("x" * 10**6, *range(1000)))
    assert len(failure.message) < MAX_MESSAGE_LENGTH + 100 and len(failure.arguments) <= 32
    assert len(failure.traceback) < MAX_TRACEBACK_LENGTH + 100
    assert len(msgspec.msgpack.encode(failure)) < 256 << 10
    long = there_and_back(ValueError("x" * 10**6))
    assert type(long) is ValueError and "characters left out" in str(long)


def test_text_that_utf8_cannot_hold_does_not_stop_it():
    back = there_and_back(ValueError("\ud800"))
    assert type(back) is ValueError and str(back) == "\\ud800"


def test_numbers_of_any_size_do_not_stop_it():
    back = there_and_back(KeyError(2**100))
    assert type(back) is KeyError and str(back) == str(2**100)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        ["builtins:ValueError", "builtins:UnicodeDecodeError", f"{__name__}:TwoArguments"]
    ),
    st.lists(JSON),
    st.dictionaries(st.text(), JSON),
)
def test_any_data_give_an_error(name, arguments, state):
    assert isinstance(
        error_of(Failure(name, "text", arguments, state), BEN, Callables((__name__,))), Exception
    )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.builds(msgspec.msgpack.encode, JSON))
def test_any_bytes_give_an_error(data):
    assert isinstance(decode_failure(data, BEN, Callables((__name__,))), Exception)


def test_invalid_text_gives_an_error():
    data = msgspec.msgpack.encode(["builtins:ValueError", "text", [], {}, "trace"]).replace(
        b"text", b"t\xffxt"
    )
    assert type(decode_failure(data, BEN, Callables((__name__,)))) is errors.ProtocolError
