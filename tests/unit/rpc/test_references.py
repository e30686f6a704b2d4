"""Single steps of the reference protocol, honest and not."""

import msgspec
import pytest

from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    MAX_BATCH,
    Confirmed,
    CreationQuery,
    Dropped,
    MessageBatch,
    NotComing,
    Peer,
    Refused,
    Register,
    Settled,
    ValuePlace,
    Wire,
)
from pibroch.rpc.references.table import MAX_LOST_REMEMBERED, ReferenceTable
from pibroch.rpc.references.user import State

OWNER = Peer(0, 100)
USER = Peer(1, 101)
OTHER = Peer(2, 102)
R = 7
FORK = 8
CHILD = 9


def place(seen=True, creator=OWNER):
    return ValuePlace(R, OWNER, creator, seen)


def owner_with_value():
    table = ReferenceTable(OWNER)
    table.owners.make(R)
    return table


def user_with_fork():
    """A user whose creation the owner has confirmed."""
    table = ReferenceTable(USER)
    fork = table.users.create(R, FORK, OWNER)
    table.users.created(fork, OWNER)
    return table, fork


def receive(table, sender, seen=True, creator=OWNER):
    return table.receive(Wire(place(seen, creator), "owner", sender, CHILD))


def test_an_owner_counts_what_it_sends_at_once():
    table = owner_with_value()
    table.owners.share(R, CHILD, USER)
    table.owners.release(R)
    assert table.take_discarded() == []
    table.handle(USER, Dropped(R, CHILD))
    assert table.take_discarded() == [R]


def test_what_comes_from_the_owner_is_confirmed_and_needs_no_message():
    table = ReferenceTable(USER)
    fork = receive(table, sender=OWNER)
    assert fork.state is State.CONFIRMED
    assert table.take_messages() == {}


def test_a_receiver_registers_then_settles_then_drops():
    table = ReferenceTable(OTHER)
    fork = receive(table, sender=USER)
    assert table.take_messages() == {OWNER: [Register(place(), CHILD)]}
    table.users.release(fork)
    assert table.take_messages() == {}  # the owner has not confirmed it yet
    table.handle(OWNER, Confirmed(R, CHILD))
    assert table.take_messages() == {USER: [Settled(CHILD)], OWNER: [Dropped(R, CHILD)]}
    assert not any(table.counts().values())


def test_a_sender_keeps_its_fork_until_the_receiver_settles():
    table, fork = user_with_fork()
    table.users.share(fork, CHILD, OTHER)
    table.users.release(fork)
    assert table.take_messages() == {}
    table.handle(OTHER, Settled(CHILD))
    assert table.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_a_reference_that_comes_home_is_a_handle_and_settles_its_sender():
    table = owner_with_value()
    assert receive(table, sender=USER) is True
    assert table.take_messages() == {USER: [Settled(CHILD)]}
    table.owners.release(R)
    assert table.take_discarded() == []
    table.owners.release(R)
    assert table.take_discarded() == [R]


def test_a_reference_to_an_earlier_life_finds_nothing_and_settles_its_sender():
    table = ReferenceTable(Peer(OWNER.worker, 999))
    assert receive(table, sender=USER) is False
    assert table.take_messages() == {USER: [Settled(CHILD)]}
    table.handle_batch(
        OTHER.worker,
        MessageBatch(
            OTHER.incarnation, OWNER.incarnation, [Register(place(), 3), CreationQuery(4)]
        ),
    )
    assert table.take_messages() == {OTHER: [Refused(3), NotComing(4)]}


def test_news_that_overtakes_the_creation_waits_for_it():
    table = ReferenceTable(OWNER)
    table.handle(OTHER, Register(place(seen=False, creator=USER), CHILD))
    assert table.take_messages() == {USER: [CreationQuery(R)], OTHER: [Confirmed(R, CHILD)]}
    assert table.counts()["expected"] == 1
    assert table.owners.created(R, FORK, USER)
    assert table.counts()["expected"] == 0
    table.handle(USER, NotComing(R))  # an answer of before
    assert table.counts()["values"] == 1


@pytest.mark.parametrize("end", ["says no", "is lost", "cannot be reached", "lives again"])
def test_a_value_that_does_not_come_fails_for_all(end):
    table = ReferenceTable(OWNER)
    table.handle(OTHER, Register(place(seen=False, creator=USER), CHILD))
    table.take_messages()
    if end == "says no":
        table.handle(USER, NotComing(R))
    elif end == "is lost":
        table.lost(USER)
    elif end == "cannot be reached":
        table.lost(Peer(USER.worker, ANY_INCARNATION))
    else:
        table.handle(Peer(USER.worker, 555), NotComing(R))
    assert table.take_failed() == [R]
    assert table.take_messages() == {OTHER: [Refused(CHILD)]}
    assert not any(table.counts().values())


def test_what_the_owner_knew_once_is_gone_and_not_expected():
    table = ReferenceTable(OWNER)
    table.handle(OTHER, Register(place(seen=True, creator=USER), CHILD))
    assert table.take_messages() == {OTHER: [Refused(CHILD)]}


def test_a_creation_that_fails_tells_the_owner_that_it_may_have_heard_of_it():
    table = ReferenceTable(USER)
    fork = table.users.create(R, FORK, OWNER)
    failure = ValueError("unreadable")
    table.users.share(fork, CHILD, OTHER)
    table.users.creation_failed(fork, failure)
    assert (fork.state, fork.failure) == (State.GONE, failure)
    assert table.take_messages() == {OWNER: [NotComing(R)]}
    assert not any(table.counts().values())


def test_the_loss_of_a_user_drops_its_forks():
    table = owner_with_value()
    table.owners.share(R, CHILD, USER)
    table.handle(USER, Register(place(), FORK))
    table.handle(OTHER, Register(place(), 77))
    table.owners.release(R)
    table.lost(Peer(USER.worker, 555))  # another life
    assert table.counts()["forks_of_others"] == 3
    table.lost(USER)
    assert table.counts()["forks_of_others"] == 1
    table.lost(OTHER)
    assert table.take_discarded() == [R]


def test_the_lost_do_not_come_back_through_late_messages():
    table = owner_with_value()
    table.lost(USER)
    table.handle(USER, Register(place(), FORK))
    table.owners.share(R, CHILD, USER)
    assert not table.owners.created(R + 1, FORK, USER)
    assert not table.owners.expects(ValuePlace(R + 2, OWNER, USER, seen_by_owner=False))
    assert table.counts()["forks_of_others"] == 0
    assert table.take_messages() == {}
    table.is_back(USER)
    table.handle(USER, Register(place(), FORK))
    assert table.take_messages() == {USER: [Confirmed(R, FORK)]}


def test_the_loss_of_the_owner_ends_forks_and_settles_their_senders():
    table = ReferenceTable(OTHER)
    fork = receive(table, sender=USER)
    table.users.share(fork, 55, Peer(3, 103))
    table.take_messages()
    table.lost(OWNER)
    assert fork.state is State.GONE
    assert table.take_messages() == {USER: [Settled(CHILD)]}
    assert not any(table.counts().values())
    late = receive(table, sender=USER)
    assert late.state is State.GONE


def test_the_loss_of_a_receiver_frees_its_sender():
    table, fork = user_with_fork()
    table.users.share(fork, CHILD, OTHER)
    table.users.share(fork, CHILD + 1, Peer(OTHER.worker, ANY_INCARNATION))  # not connected yet
    table.users.release(fork)
    table.lost(OTHER)
    assert table.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_a_message_that_is_not_sent_frees_its_sender():
    table, fork = user_with_fork()
    table.users.share(fork, CHILD, OTHER)
    table.users.release(fork)
    table.unshare(Wire(place(), "owner", USER, CHILD))
    assert table.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_an_owner_that_cannot_be_reached_never_hears_of_pending_forks():
    table = ReferenceTable(OTHER)
    pending = receive(table, sender=USER)
    table.lost(Peer(OWNER.worker, ANY_INCARNATION))
    assert pending.state is State.GONE
    confirmed_book, confirmed = user_with_fork()
    confirmed_book.lost(Peer(OWNER.worker, ANY_INCARNATION))
    assert confirmed.state is State.CONFIRMED


def test_the_same_fork_twice_is_refused():
    table = ReferenceTable(OTHER)
    assert receive(table, sender=USER) is not None
    assert receive(table, sender=USER) is None
    owner = ReferenceTable(OWNER)
    assert owner.owners.created(R, FORK, USER)
    with pytest.raises(ValueError, match="exists already"):
        owner.owners.created(R, FORK, USER)
    with pytest.raises(ValueError, match="exists already"):
        owner.owners.created(R, FORK + 1, OTHER)


def test_nobody_speaks_for_another():
    table = owner_with_value()
    table.owners.share(R, CHILD, USER)
    table.owners.release(R)
    table.handle(OTHER, Dropped(R, CHILD))
    table.handle(OTHER, Register(place(), CHILD))
    assert table.take_discarded() == [] and table.take_messages() == {}
    user, fork = user_with_fork()
    user.users.share(fork, CHILD, OTHER)
    user.handle(OWNER, Settled(CHILD))
    user.handle(OTHER, Refused(FORK))
    assert user.counts()["children"] == 1 and fork.state is State.CONFIRMED


def test_the_memory_of_the_lost_is_bounded():
    table = ReferenceTable(OWNER)
    for incarnation in range(1, MAX_LOST_REMEMBERED + 10):
        table.lost(Peer(1, incarnation))
    assert Peer(1, 1) not in table._lost and Peer(1, MAX_LOST_REMEMBERED) in table._lost


def test_batches_are_bounded_on_the_wire():
    encode = msgspec.msgpack.encode
    decode = msgspec.msgpack.Decoder(MessageBatch).decode
    news = MessageBatch(1, 2, [Register(place(), 3), Dropped(1, 2), Confirmed(1, 2)])
    assert decode(encode(news)) == news
    with pytest.raises(msgspec.ValidationError):
        decode(encode(MessageBatch(1, 2, [Settled(3)] * (MAX_BATCH + 1))))


def test_nothing_is_kept_for_a_receiver_that_is_lost_already():
    table, fork = user_with_fork()
    table.lost(OTHER)
    table.users.share(fork, CHILD, OTHER)
    table.users.release(fork)
    assert table.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_a_creation_that_comes_answers_those_that_asked():
    table = ReferenceTable(USER)
    fork = table.users.create(R, FORK, Peer(OWNER.worker, ANY_INCARNATION))
    earlier = Peer(OWNER.worker, 99)
    table.handle(earlier, CreationQuery(R))
    table.handle(OWNER, CreationQuery(R))
    assert table.take_messages() == {}
    table.users.created(fork, OWNER)
    # which will not get what the present owner has
    assert table.take_messages() == {earlier: [NotComing(R)]}
    assert fork.owner == OWNER
