"""Kafka: a topic's partitions are the stream's, and positions are ours alone.

Nothing is committed to brokers: whoever goes on knows its offsets from its checkpoint, and the
partitions of a rank from its number, so there is no group and nothing is rebalanced.
"""

from __future__ import annotations

import logging
import time
import zlib
from typing import TYPE_CHECKING

from pibroch.data.layout import Layout
from pibroch.data.schema import Schema
from pibroch.data.streams.base import Range, Records, changed, check_same
from pibroch.data.streams.json_lines import JsonLines
from pibroch.data.streams.text import Convert, Lines, checked_lines
from pibroch.errors import ConfigError, DataError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

logger = logging.getLogger(__name__)
ANSWER_S = 30.0
"""How long brokers may take for what must be known at once: partitions, records read before."""
_POLL_S = 0.05
_QUEUED_KB = 16 << 10
"""Of messages that are fetched ahead, a partition."""
_NO_MESSAGE = b"x"


class Kafka:
    """A topic.

    Args:
        brokers: ``host:port``, several between commas.
        topic: its name.
        schema: of the records, one a message.
        format: of messages: ``jsonl`` (one object each), ``csv`` or ``tsv``.
        most_record_bytes: of a message; longer ones are bad.
        settings: further ones of librdkafka, such as for encryption.

    Raises:
        ConfigError: without confluent-kafka, or without names of columns.
        DataError: when no broker answers, or there is no such topic.
    """

    def __init__(
        self,
        brokers: str,
        topic: str,
        schema: Schema,
        format: str = "jsonl",
        most_record_bytes: int = 1 << 20,
        settings: dict[str, str | int | float | bool] | None = None,
    ) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise ConfigError(
                "a stream of Kafka without the package confluent-kafka",
                "the extra `kafka`",
                "run `pip install 'pibroch[kafka]'`",
            ) from error
        self._library = confluent_kafka
        self._brokers = brokers
        self._topic = topic
        self._settings = settings or {}
        self._messages = _Messages(schema, format, most_record_bytes)
        self.partitions = self._find_partitions()

    def open(self, partition: str) -> KafkaPartition:
        """See :class:`Source`."""
        return KafkaPartition(self.consumer(), self._topic, int(partition), self._messages)

    def close(self) -> None:
        """See :class:`Source`."""

    def consumer(self) -> Consumer:
        """A consumer of this topic's brokers; it is in no group that matters."""
        return self._library.Consumer(
            {
                "bootstrap.servers": self._brokers,
                "group.id": "pibroch",  # has to be there; nothing is committed
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "queued.max.messages.kbytes": _QUEUED_KB,
                "isolation.level": "read_committed",
                "error_cb": _warn,
                **self._settings,
            }
        )

    def _find_partitions(self) -> tuple[str, ...]:
        consumer = self.consumer()
        try:
            found = consumer.list_topics(self._topic, timeout=ANSWER_S).topics.get(self._topic)
        except self._library.KafkaException as error:
            raise DataError(
                f"no answer from the brokers {self._brokers}: {error.args[0].str()}",
                "brokers that answer",
                "check `data.stream.brokers`",
            ) from error
        finally:
            consumer.close()
        if found is None or found.error is not None or not found.partitions:
            reason = "" if found is None or found.error is None else f" ({found.error.str()})"
            raise DataError(
                f"no topic {self._topic!r} at {self._brokers}{reason}",
                "a topic that is there",
                "check `data.stream.topic`, or create it",
            )
        return tuple(map(str, sorted(found.partitions)))


class KafkaPartition:
    """See :class:`Partition`; has a consumer of its own.

    Args:
        consumer: of no partition yet.
        topic: its name.
        number: of the partition.
        messages: makes text of them.
    """

    def __init__(self, consumer: Consumer, topic: str, number: int, messages: _Messages) -> None:
        self.name = str(number)
        self._consumer = consumer
        self._topic = topic
        self._number = number
        self._messages = messages
        self._offset: int | None = None
        self._is_assigned = False
        self._error: KafkaError | None = None
        self._num_read = 0
        self._silent_since: float | None = None

    @property
    def order(self) -> str:
        """See :class:`Partition`: in turn, so that none waits for the backlog of another."""
        return f"{self._num_read:020d}"

    @property
    def is_waiting(self) -> bool:
        """Whether messages are there that have not come yet."""
        low, high = self._consumer.get_watermark_offsets(self._assigned(), cached=True)
        if high < 0:  # not known yet
            self._warn_of_silence()
            return True
        return (low if self._offset is None else self._offset) < high

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        self._assign()
        if self._error is not None:
            raise self._refused(self._error)
        messages = self._good(self._consumer.consume(most_records, timeout=0.0))
        if not messages:
            if self._error is not None:
                raise self._refused(self._error)
            return None
        self._num_read += len(messages)
        return self._records(messages)

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        if self._offset != range.begin:
            self._offset = range.begin
            self._is_assigned = False
        self._assign()
        messages: list[Message] = []
        deadline = time.monotonic() + ANSWER_S
        while len(messages) < range.records:
            left = range.records - len(messages)
            messages += self._good(self._consumer.consume(left, timeout=_POLL_S))
            if self._error is not None:
                raise self._refused(self._error)
            if time.monotonic() > deadline:
                raise changed(range, f"of which {len(messages):,} have come in {ANSWER_S:.0f} s")
        records = self._records(messages)
        check_same(range, records.range.crc)
        self._offset = range.end
        return records

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`.

        The next message must still be there, not those before.
        """
        self._offset = range.end
        self._is_assigned = False

    def close(self) -> None:
        """See :class:`Partition`."""
        self._consumer.close()

    def _assigned(self) -> TopicPartition:
        from confluent_kafka import OFFSET_BEGINNING, TopicPartition

        offset = OFFSET_BEGINNING if self._offset is None else self._offset
        return TopicPartition(self._topic, self._number, offset)

    def _assign(self) -> None:
        if not self._is_assigned:
            self._consumer.assign([self._assigned()])
            self._is_assigned = True

    def _warn_of_silence(self) -> None:
        """Once, of a partition of which no broker has said anything for long."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        elif self._silent_since < now - ANSWER_S:
            self._silent_since = float("inf")
            where = f"partition {self.name} of {self._topic!r}"
            logger.warning("Kafka: no word of %s, which may have no leader; waiting", where)

    def _good(self, messages: list[Message]) -> list[Message]:
        """Messages up to the first error, which is kept."""
        for place, message in enumerate(messages):
            error = message.error()
            if error is not None:
                self._error = error
                return messages[:place]
        return messages

    def _records(self, messages: list[Message]) -> Records:
        first = _offset_of(messages[0]) if self._offset is None else self._offset
        end = _offset_of(messages[-1]) + 1
        lines, empty = self._messages.lines([message.value() for message in messages])
        converted = self._messages.convert(lines, first)
        bad = converted.bad | {first + place: reason for place, reason in empty.items()}
        crc = zlib.crc32(lines)
        range = Range(self.name, self._topic, first, end, first - 1, len(messages), crc)
        self._offset = end
        layout = self._messages.layout
        return Records(range, converted.text, self._messages.columns, layout, bad, lines)

    def _refused(self, error: KafkaError) -> DataError:
        where = f"partition {self.name} of {self._topic!r} at offset {self._offset}"
        from confluent_kafka import KafkaError

        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            return DataError(
                f"{where}, which the brokers do not have any more: {error.str()}",
                "messages that are kept until they are trained",
                "keep them for longer, and begin a new run: events between are lost",
            )
        return DataError(f"{where}: {error.str()}", "messages", "look at the brokers")


class _Messages:
    """Makes lines of messages, and text of lines."""

    def __init__(self, schema: Schema, format: str, most_bytes: int) -> None:
        self.convert: Convert
        self._is_json = format == "jsonl"
        if self._is_json:
            json_lines = JsonLines(schema, most_bytes)
            self.columns = json_lines.texts.columns
            self.layout = json_lines.texts.layout
            self.convert = json_lines
            return
        if schema.columns is None:
            raise ConfigError(
                "delimited text in messages, which have no header",
                "the names of the columns",
                "give them as `columns` in the schema, or send JSON",
            )
        self.columns = schema.columns
        layout = Layout("\t" if format == "tsv" else schema.separator, schema.quotes)
        self.layout = layout

        def check(lines: bytes, first_line: int) -> Lines:
            return checked_lines(lines, first_line, layout, most_bytes)

        self.convert = check

    def lines(self, values: list[bytes | None]) -> tuple[bytes, dict[int, str]]:
        """A line a message, and reasons of those that are none, by their place."""
        lines = []
        bad: dict[int, str] = {}
        for place, value in enumerate(values):
            line = value if value is not None else b""
            line = line.removesuffix(b"\n")
            if self._is_json:
                line = line.replace(b"\n", b" ")  # between values; inside of texts it is escaped
            if not line.strip():
                bad[place] = "an empty message"
                line = _NO_MESSAGE
            elif b"\n" in line:
                bad[place] = "a message of several lines"
                line = _NO_MESSAGE
            lines.append(line)
        return b"\n".join(lines) + b"\n", bad


def _offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "of a message that was fetched"
    return offset


def _warn(error: KafkaError) -> None:
    """Of what librdkafka mends by itself, such as a lost broker."""
    logger.warning("Kafka: %s", error.str())
