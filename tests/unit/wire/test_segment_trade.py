"""Memory of processes that are not there any more."""

import socket

import pytest

from pibroch.collectives.mailbox import Mailbox
from pibroch.wire.segment_trade import receive_segment


@pytest.mark.parametrize("has_unread", [False, True])
def test_who_has_ended_sends_no_memory(has_unread):
    """A peer that left something unread is seen as a reset connection.

    Another one is seen as closed.
    """
    ours, theirs = socket.socketpair()
    if has_unread:
        ours.send(b"unread")
    theirs.close()
    with ours, pytest.raises(ConnectionError):
        receive_segment(ours)


def test_a_mailbox_to_who_has_ended_is_an_error_of_the_connection():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionError):
        Mailbox({1: ours}, 0, 2, 5.0)
