"""Where a remote module is, and what a peer may say of one."""

import pytest

from pibroch.errors import ConfigError, ProtocolError
from pibroch.rpc.remote_module import RemoteModule, worker_and_device
from pibroch.rpc.rref import RRef

REFERENCE = RRef.__new__(RRef)


@pytest.mark.parametrize("name", ["", "/cpu", "rank:/cpu", "rank:x"])
def test_where_there_is_no_worker(name):
    with pytest.raises(ConfigError, match="remote device"):
        worker_and_device(name)


def test_one_that_arrived_is_where_its_sender_said():
    made = RemoteModule.__rpc_made__(["worker1", "cpu", REFERENCE])
    assert (made.on, made.device, made.module_rref) == ("worker1", "cpu", REFERENCE)
    assert RemoteModule.__rpc_made__([1, "cpu", REFERENCE]).on == 1


@pytest.mark.parametrize(
    "state",
    [
        None,
        "abc",
        ["worker1", "cpu"],
        ["worker1", "cpu", REFERENCE, REFERENCE],
        [["worker1"], "cpu", REFERENCE],
        [True, "cpu", REFERENCE],
        ["worker1", None, REFERENCE],
        ["worker1", "c" * 65, REFERENCE],
        ["worker1", "cpu", "a reference"],
    ],
    ids=range(9),
)
def test_what_is_no_state_of_a_remote_module_is_refused(state):
    with pytest.raises(ProtocolError, match="remote module"):
        RemoteModule.__rpc_made__(state)
