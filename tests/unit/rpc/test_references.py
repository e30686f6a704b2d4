"""Single steps of the reference protocol, honest and not."""

import msgspec
import pytest

from pibroch.rpc.references import ANY_LIFE, MAX_BATCH, News, Peer, Place, ReferenceBook, State, Wire
from pibroch.rpc.references.book import MAX_LOST_REMEMBERED
from pibroch.rpc.references.messages import (
    Asked,
    Confirmed,
    Dropped,
    NotComing,
    Refused,
    Register,
    Settled,
)

OWNER, USER, OTHER = Peer(0, 100), Peer(1, 101), Peer(2, 102)
R, FORK, CHILD = 7, 8, 9


def place(known=True, creator=OWNER):
    return Place(R, OWNER, creator, known)


def owner_with_value():
    book = ReferenceBook(OWNER)
    book.owners.make(R)
    return book


def user_with_fork():
    """A user whose creation the owner has confirmed."""
    book = ReferenceBook(USER)
    fork = book.users.create(R, FORK, OWNER)
    book.users.created(fork, OWNER)
    return book, fork


def receive(book, sender, known=True, creator=OWNER):
    return book.receive(Wire(place(known, creator), "owner", sender, CHILD))


def test_an_owner_counts_what_it_sends_at_once():
    book = owner_with_value()
    book.owners.share(R, CHILD, USER)
    book.owners.release(R)
    assert book.take_discarded() == []
    book.handle(USER, Dropped(R, CHILD))
    assert book.take_discarded() == [R]


def test_what_comes_from_the_owner_is_confirmed_and_needs_no_message():
    book = ReferenceBook(USER)
    fork = receive(book, sender=OWNER)
    assert fork.state is State.CONFIRMED
    assert book.take_messages() == {}


def test_a_receiver_registers_then_settles_then_drops():
    book = ReferenceBook(OTHER)
    fork = receive(book, sender=USER)
    assert book.take_messages() == {OWNER: [Register(place(), CHILD)]}
    book.users.release(fork)
    assert book.take_messages() == {}  # the owner has not confirmed it yet
    book.handle(OWNER, Confirmed(R, CHILD))
    assert book.take_messages() == {USER: [Settled(CHILD)], OWNER: [Dropped(R, CHILD)]}
    assert not any(book.counts().values())


def test_a_sender_keeps_its_fork_until_the_receiver_settles():
    book, fork = user_with_fork()
    book.users.share(fork, CHILD, OTHER)
    book.users.release(fork)
    assert book.take_messages() == {}
    book.handle(OTHER, Settled(CHILD))
    assert book.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_a_reference_that_comes_home_is_a_handle_and_settles_its_sender():
    book = owner_with_value()
    assert receive(book, sender=USER) is True
    assert book.take_messages() == {USER: [Settled(CHILD)]}
    book.owners.release(R)
    assert book.take_discarded() == []
    book.owners.release(R)
    assert book.take_discarded() == [R]


def test_a_reference_to_an_earlier_life_finds_nothing_and_settles_its_sender():
    book = ReferenceBook(Peer(OWNER.worker, 999))
    assert receive(book, sender=USER) is False
    assert book.take_messages() == {USER: [Settled(CHILD)]}
    book.handle_news(OTHER.worker, News(OTHER.incarnation, OWNER.incarnation, [Register(place(), 3), Asked(4)]))
    assert book.take_messages() == {OTHER: [Refused(3), NotComing(4)]}


def test_news_that_overtakes_the_creation_waits_for_it():
    book = ReferenceBook(OWNER)
    book.handle(OTHER, Register(place(known=False, creator=USER), CHILD))
    assert book.take_messages() == {USER: [Asked(R)], OTHER: [Confirmed(R, CHILD)]}
    assert book.counts()["expected"] == 1
    assert book.owners.created(R, FORK, USER)
    assert book.counts()["expected"] == 0
    book.handle(USER, NotComing(R))  # an answer of before
    assert book.counts()["values"] == 1


@pytest.mark.parametrize("end", ["says no", "is lost", "cannot be reached", "lives again"])
def test_a_value_that_does_not_come_fails_for_all(end):
    book = ReferenceBook(OWNER)
    book.handle(OTHER, Register(place(known=False, creator=USER), CHILD))
    book.take_messages()
    if end == "says no":
        book.handle(USER, NotComing(R))
    elif end == "is lost":
        book.lost(USER)
    elif end == "cannot be reached":
        book.lost(Peer(USER.worker, ANY_LIFE))
    else:
        book.handle(Peer(USER.worker, 555), NotComing(R))
    assert book.take_failed() == [R]
    assert book.take_messages() == {OTHER: [Refused(CHILD)]}
    assert not any(book.counts().values())


def test_what_the_owner_knew_once_is_gone_and_not_expected():
    book = ReferenceBook(OWNER)
    book.handle(OTHER, Register(place(known=True, creator=USER), CHILD))
    assert book.take_messages() == {OTHER: [Refused(CHILD)]}


def test_a_creation_that_fails_tells_the_owner_that_it_may_have_heard_of_it():
    book = ReferenceBook(USER)
    fork = book.users.create(R, FORK, OWNER)
    failure = ValueError("unreadable")
    book.users.share(fork, CHILD, OTHER)
    book.users.creation_failed(fork, failure)
    assert (fork.state, fork.failure) == (State.GONE, failure)
    assert book.take_messages() == {OWNER: [NotComing(R)]}
    assert not any(book.counts().values())


def test_the_loss_of_a_user_drops_its_forks():
    book = owner_with_value()
    book.owners.share(R, CHILD, USER)
    book.handle(USER, Register(place(), FORK))
    book.handle(OTHER, Register(place(), 77))
    book.owners.release(R)
    book.lost(Peer(USER.worker, 555))  # another life
    assert book.counts()["forks_of_others"] == 3
    book.lost(USER)
    assert book.counts()["forks_of_others"] == 1
    book.lost(OTHER)
    assert book.take_discarded() == [R]


def test_the_lost_do_not_come_back_through_late_messages():
    book = owner_with_value()
    book.lost(USER)
    book.handle(USER, Register(place(), FORK))
    book.owners.share(R, CHILD, USER)
    assert not book.owners.created(R + 1, FORK, USER)
    assert not book.owners.wants(Place(R + 2, OWNER, USER, known=False))
    assert book.counts()["forks_of_others"] == 0
    assert book.take_messages() == {}
    book.is_back(USER)
    book.handle(USER, Register(place(), FORK))
    assert book.take_messages() == {USER: [Confirmed(R, FORK)]}


def test_the_loss_of_the_owner_ends_forks_and_settles_their_senders():
    book = ReferenceBook(OTHER)
    fork = receive(book, sender=USER)
    book.users.share(fork, 55, Peer(3, 103))
    book.take_messages()
    book.lost(OWNER)
    assert fork.state is State.GONE
    assert book.take_messages() == {USER: [Settled(CHILD)]}
    assert not any(book.counts().values())
    late = receive(book, sender=USER)
    assert late.state is State.GONE


def test_the_loss_of_a_receiver_frees_its_sender():
    book, fork = user_with_fork()
    book.users.share(fork, CHILD, OTHER)
    book.users.share(fork, CHILD + 1, Peer(OTHER.worker, ANY_LIFE))  # not connected yet
    book.users.release(fork)
    book.lost(OTHER)
    assert book.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_a_message_that_is_not_sent_frees_its_sender():
    book, fork = user_with_fork()
    book.users.share(fork, CHILD, OTHER)
    book.users.release(fork)
    book.unshare(Wire(place(), "owner", USER, CHILD))
    assert book.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_an_owner_that_cannot_be_reached_never_hears_of_pending_forks():
    book = ReferenceBook(OTHER)
    pending = receive(book, sender=USER)
    book.lost(Peer(OWNER.worker, ANY_LIFE))
    assert pending.state is State.GONE
    confirmed_book, confirmed = user_with_fork()
    confirmed_book.lost(Peer(OWNER.worker, ANY_LIFE))
    assert confirmed.state is State.CONFIRMED


def test_the_same_fork_twice_is_refused():
    book = ReferenceBook(OTHER)
    assert receive(book, sender=USER) is not None
    assert receive(book, sender=USER) is None
    owner = ReferenceBook(OWNER)
    assert owner.owners.created(R, FORK, USER)
    with pytest.raises(ValueError, match="exists already"):
        owner.owners.created(R, FORK, USER)
    with pytest.raises(ValueError, match="exists already"):
        owner.owners.created(R, FORK + 1, OTHER)


def test_nobody_speaks_for_another():
    book = owner_with_value()
    book.owners.share(R, CHILD, USER)
    book.owners.release(R)
    book.handle(OTHER, Dropped(R, CHILD))
    book.handle(OTHER, Register(place(), CHILD))
    assert book.take_discarded() == [] and book.take_messages() == {}
    user, fork = user_with_fork()
    user.users.share(fork, CHILD, OTHER)
    user.handle(OWNER, Settled(CHILD))
    user.handle(OTHER, Refused(FORK))
    assert user.counts()["children"] == 1 and fork.state is State.CONFIRMED


def test_the_memory_of_the_lost_is_bounded():
    book = ReferenceBook(OWNER)
    for incarnation in range(1, MAX_LOST_REMEMBERED + 10):
        book.lost(Peer(1, incarnation))
    assert not book.is_lost(Peer(1, 1)) and book.is_lost(Peer(1, MAX_LOST_REMEMBERED))


def test_batches_are_bounded_on_the_wire():
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(News).decode
    news = News(1, 2, [Register(place(), 3), Dropped(1, 2), Confirmed(1, 2)])
    assert decode(encode(news)) == news
    with pytest.raises(msgspec.ValidationError):
        decode(encode(News(1, 2, [Settled(3)] * (MAX_BATCH + 1))))


def test_nothing_is_kept_for_a_receiver_that_is_lost_already():
    book, fork = user_with_fork()
    book.lost(OTHER)
    book.users.share(fork, CHILD, OTHER)
    book.users.release(fork)
    assert book.take_messages() == {OWNER: [Dropped(R, FORK)]}


def test_a_creation_that_comes_answers_those_that_asked():
    book = ReferenceBook(USER)
    fork = book.users.create(R, FORK, Peer(OWNER.worker, ANY_LIFE))
    earlier = Peer(OWNER.worker, 99)
    book.handle(earlier, Asked(R))
    book.handle(OWNER, Asked(R))
    assert book.take_messages() == {}
    book.users.created(fork, OWNER)
    assert book.take_messages() == {earlier: [NotComing(R)]}  # which will not get what the present owner has
    assert fork.owner == OWNER
