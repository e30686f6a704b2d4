"""One consumer of Kafka for all partitions that a rank reads.

A consumer of librdkafka has threads and connections for each broker, whatever it reads. What it
gives is of all partitions in turn; here it is kept until each one asks for its own.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pibroch.config.kafka import FIXED, KafkaSettings, check_settings
from pibroch.config.secret import Secret, is_secret
from pibroch.errors import ConfigError, DataError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

logger = logging.getLogger(__name__)
ANSWER_S = 30.0
"""How long brokers may take for what must be known at once: partitions, records read before."""
_SPEED = {"queued.max.messages.kbytes": 16 << 10, "fetch.wait.max.ms": 100}
"""How much is fetched ahead, of all partitions together, and how soon brokers tell their ends."""
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_MOST_KINDS = 100


class SharedConsumer:
    """A consumer of a topic, and what has come of partitions that have not asked for it yet.

    Args:
        brokers: ``host:port``, several between commas.
        topic: its name.
        settings: further ones of librdkafka.

    Raises:
        ConfigError: without confluent-kafka, or for settings that are none.
    """

    def __init__(self, brokers: str, topic: str, settings: KafkaSettings) -> None:
        self.brokers = brokers
        self.topic = topic
        self.num_kept = 0
        self.is_drained = False
        """Whether all that was fetched is handed out."""
        self._consumer = _consumer(brokers, settings)
        self._partitions: dict[int, PartitionConsumer] = {}
        self._assigned: set[int] = set()

    def find_partitions(self) -> list[int]:
        """Numbers of the topic's partitions.

        Raises:
            DataError: when no broker answers, or there is no such topic.
        """
        from confluent_kafka import KafkaException

        try:
            topics = self._consumer.list_topics(self.topic, timeout=ANSWER_S).topics
        except KafkaException as error:
            self._consumer.poll(0)  # logs why
            raise DataError(
                f"no answer from the brokers {self.brokers}: {error.args[0].str()}",
                "brokers that answer",
                "check `data.stream.brokers`",
            ) from error
        found = topics.get(self.topic)
        if found is None or found.error is not None or not found.partitions:
            reason = "" if found is None or found.error is None else f" ({found.error.str()})"
            raise DataError(
                f"no topic {self.topic!r} at {self.brokers}{reason}",
                "a topic that is there",
                "check `data.stream.topic`, or create it",
            )
        return sorted(found.partitions)

    def partition(self, number: int) -> PartitionConsumer:
        """What one partition has of this."""
        self._partitions[number] = PartitionConsumer(self, number)
        return self._partitions[number]

    def poll(self, most: int, timeout_s: float) -> None:
        """Hand out what has come of any partition."""
        from confluent_kafka import KafkaError

        self._assign()
        messages = self._consumer.consume(most, timeout=timeout_s)
        self.is_drained = len(messages) < most
        for message in messages:
            number = message.partition()
            error = message.error()
            own = self._partitions.get(number)  # type: ignore[arg-type]  # None has none
            if error is None and own is not None:
                own.keep(message)
            elif error is not None:
                of_all = list(self._partitions.values())
                for partition in of_all if own is None else [own]:
                    partition.reach(message, error.code() == KafkaError._PARTITION_EOF)

    def close(self) -> None:
        """Let go of connections and threads."""
        self._consumer.close()

    def _assign(self) -> None:
        """Have partitions fetched from where they are to go on, all that are new at once.

        A fetch waits at the broker; a partition that is assigned later waits for its end.
        """
        from confluent_kafka import OFFSET_BEGINNING, TopicPartition

        old = []
        new = []
        for partition in self._partitions.values():
            if not partition.is_moved:
                continue
            offset = OFFSET_BEGINNING if partition.begin is None else partition.begin
            new.append(TopicPartition(self.topic, partition.number, offset))
            if partition.number in self._assigned:
                old.append(new[-1])
            self._assigned.add(partition.number)
            partition.is_moved = False
        if old:
            self._consumer.incremental_unassign(old)
        if new:
            self._consumer.incremental_assign(new)


class PartitionConsumer:
    """What a partition has of a shared consumer.

    Attributes:
        number: of the partition.
        begin: offset of what is consumed first; the oldest message's when absent.
        is_moved: whether that is to be told to the brokers yet.
    """

    def __init__(self, shared: SharedConsumer, number: int) -> None:
        self.number = number
        self.begin: int | None = None
        self.is_moved = True
        self._shared = shared
        self._has_ended = False
        self._failure: Message | None = None
        self._kept: deque[Message] = deque()
        self._silent_since: float | None = None

    def assign(self, offset: int | None) -> None:
        """Give messages from an offset on, or from the oldest."""
        self._shared.num_kept -= len(self._kept)
        self._kept.clear()
        self._failure = None
        self.begin = offset
        self.is_moved = True
        self._has_ended = False

    def consume(self, most: int, timeout: float) -> list[Message]:
        """Messages that have come; or one that is an error, after all before it.

        Without a timeout nothing more is taken from the brokers while others have so much to
        consume: a backlog of one partition is not kept for another.
        """
        missing = most - (len(self._kept) if timeout else self._shared.num_kept)
        if not self._kept and self._failure is None and missing > 0:
            self._shared.poll(missing, timeout)
        if not self._kept and self._failure is not None:
            return [self._failure]
        taken = [self._kept.popleft() for _ in range(min(most, len(self._kept)))]
        self._shared.num_kept -= len(taken)
        return taken

    @property
    def is_at_end(self) -> bool:
        """Whether the brokers have said that nothing more is there, for now.

        Offsets do not say that: the last ones may be those of markers of transactions, of events
        that were taken back, or of what compaction has removed.
        """
        if not self._has_ended and not self._kept and self._shared.is_drained:
            self._warn_of_silence()
        return self._has_ended and not self._kept

    def keep(self, message: Message) -> None:
        """Keep a message that has come; none behind one that could not be read."""
        if self._failure is None:
            self._kept.append(message)
            self._shared.num_kept += 1
            self._has_ended = False
            self._silent_since = None

    def reach(self, error: Message, is_end: bool) -> None:
        """Note that nothing more is there, or what is wrong behind all that was kept."""
        self._silent_since = None
        if is_end:
            self._has_ended = True
        elif self._failure is None:
            self._failure = error

    def _warn_of_silence(self) -> None:
        """Once, of a partition of which no broker has said anything for long."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        elif self._silent_since < now - ANSWER_S:
            self._silent_since = float("inf")
            where = f"partition {self.number} of {self._shared.topic!r}"
            logger.warning("Kafka: no word of %s, which may have no leader; waiting", where)


class Seldom:
    """Which lines of a log are written: the first of a kind, and further ones after pauses.

    The pauses double while the kind goes on; it is new again when it has stopped for as long.

    >>> lines = Seldom()
    >>> [lines.take("lost", now) for now in (0.0, 1.0, 2.0, 30.0, 31.0, 60.0, 90.0)]
    [0, None, None, 2, None, None, 2]
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, float, int]] = {}

    def take(self, kind: str, now: float) -> int | None:
        """How many were left out before this one; ``None`` to leave it out, too."""
        begun, pause, dropped = self._kinds.get(kind, (now, 0.0, 0))
        if now < begun + pause:
            self._kinds[kind] = begun, pause, dropped + 1
            return None
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        has_stopped = now >= begun + 2 * pause
        pause = _FIRST_PAUSE_S if has_stopped else min(2 * pause, _LONGEST_PAUSE_S)
        self._kinds[kind] = now, pause, 0
        return dropped


class BrokerLog:
    """What librdkafka logs, which mends by itself what it complains of, such as a lost broker.

    It would say so several times a second, for each broker and for as long as that is away.
    """

    def __init__(self) -> None:
        self._seldom = Seldom()

    def log(self, level: int, text: str, *args: object) -> None:
        """Log a line, unless there were such ones lately; called where the consumer is polled."""
        if not logger.isEnabledFor(level):
            return
        line = text % args
        kind = re.sub(r"[0-9]+", "", line)  # all brokers of a name, whatever was counted
        dropped = self._seldom.take(kind, time.monotonic())
        if dropped is not None:
            more = f" (and {dropped:,} more like it)" if dropped else ""
            logger.log(min(level, logging.WARNING), "Kafka: %s%s", line, more)


def _consumer(brokers: str, settings: KafkaSettings) -> Consumer:
    """In no group that matters."""
    try:
        import confluent_kafka
    except ImportError as error:
        raise ConfigError(
            "a stream of Kafka without the package confluent-kafka",
            "the extra `kafka`",
            "run `pip install 'pibroch[kafka]'`",
        ) from error
    try:
        check_settings(settings)
    except ValueError as error:
        raise ConfigError(f"`kafka`, which {error}", "settings of librdkafka") from error
    plain = {
        name: value.read(f"`{name}`") if isinstance(value, Secret) else value
        for name, value in settings.items()
    }
    ours: dict[str, Any] = {**_SPEED, **plain, **FIXED}
    ours["bootstrap.servers"] = brokers
    try:
        return confluent_kafka.Consumer(ours, logger=BrokerLog())
    except (confluent_kafka.KafkaException, TypeError, ValueError) as error:
        what = error.args[0]
        text = what.str() if isinstance(what, confluent_kafka.KafkaError) else str(what)
        raise ConfigError(
            f"`kafka` in [data.stream], of which librdkafka says: {_redacted(text, plain)}",
            "settings that it has, with values that it takes",
            "correct it; librdkafka's CONFIGURATION.md has all of them",
        ) from None  # what it says may quote a password


def _redacted(text: str, settings: Mapping[str, object]) -> str:
    """A text without secrets that it quotes.

    >>> _redacted("Invalid value horse", {"sasl.password": "horse"})
    'Invalid value ***'
    """
    for name, value in settings.items():
        if is_secret(name) and str(value):
            text = text.replace(str(value), "***")
    return text
