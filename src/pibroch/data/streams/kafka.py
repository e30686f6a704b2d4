"""Kafka: a topic's partitions are the stream's, and positions are ours alone.

Nothing is committed to brokers: whoever goes on knows its offsets from its checkpoint, and the
partitions of a rank from its number, so there is no group and nothing is rebalanced.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

from pibroch.config.kafka import KafkaSettings
from pibroch.data.layout import Layout
from pibroch.data.schema import Schema
from pibroch.data.streams import kafka_consumer
from pibroch.data.streams.base import Range, Records, changed, check_same
from pibroch.data.streams.json_lines import JsonLines
from pibroch.data.streams.kafka_consumer import PartitionConsumer, SharedConsumer
from pibroch.data.streams.text import Convert, Lines, checked_lines
from pibroch.errors import ConfigError, DataError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

_POLL_S = 0.05
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
        ConfigError: without confluent-kafka, for settings that librdkafka does not have or that
            pibroch decides, or without names of columns.
        DataError: when no broker answers, or there is no such topic.
    """

    def __init__(
        self,
        brokers: str,
        topic: str,
        schema: Schema,
        format: str = "jsonl",
        most_record_bytes: int = 1 << 20,
        settings: KafkaSettings | None = None,
    ) -> None:
        self._messages = _Messages(schema, format, most_record_bytes)
        self._consumer = SharedConsumer(brokers, topic, settings or {})
        try:
            self.partitions = tuple(map(str, self._consumer.find_partitions()))
        except DataError:
            self.close()
            raise

    def open(self, partition: str) -> KafkaPartition:
        """See :class:`Source`."""
        number = int(partition)
        consumer = self._consumer.partition(number)
        return KafkaPartition(consumer, self._consumer.topic, number, self._messages)

    def close(self) -> None:
        """See :class:`Source`."""
        self._consumer.close()


class KafkaPartition:
    """See :class:`Partition`.

    Offsets rise, and some are those of no message: of markers of transactions, of events that were
    taken back, of what was compacted. So a range has its messages counted, and goes from where
    reading began to behind its last message.

    Args:
        consumer: of this partition.
        topic: its name.
        number: of the partition.
        messages: makes text of them.
    """

    def __init__(
        self, consumer: PartitionConsumer, topic: str, number: int, messages: _Messages
    ) -> None:
        self.name = str(number)
        self._consumer = consumer
        self._place = f"{topic}[{number}]"
        self._messages = messages
        self._offset: int | None = None
        self._num_read = 0
        self._before: Range | None = None  # read by another process, and not compared yet
        self._found: list[Message] = []  # of that range
        consumer.assign(None)

    @property
    def order(self) -> str:
        """See :class:`Partition`: in turn, so that none waits for the backlog of another."""
        return f"{self._num_read:020d}"

    @property
    def is_waiting(self) -> bool:
        """Whether messages are there that have not come yet."""
        return self._before is not None or not self._consumer.is_at_end

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        if not self._is_compared(0.0):
            return None
        messages = self._consume(most_records, 0.0)
        if not messages:
            return None
        self._num_read += len(messages)
        return self._records(messages)

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        deadline = time.monotonic() + kafka_consumer.ANSWER_S
        while not self._is_compared(_POLL_S):
            if time.monotonic() > deadline:
                raise self._silent(range)
        if self._offset != range.begin:
            self._go_to(range.begin)
        messages: list[Message] = []
        while not self._are_all(messages, range):
            if time.monotonic() > deadline:
                raise self._silent(range)
            messages += self._consume(range.records - len(messages), _POLL_S)
        if (found := _within(messages, range)) != range.records:
            raise changed(range, f"of which {found:,} messages are there now")
        records = self._records(messages)
        check_same(range, records.range.crc)
        return records

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`.

        The range is compared before anything else is read, where all of it is there yet: a topic
        that was made again has other messages. Where some were dropped, or compacted, the next
        message must still be there.
        """
        self._go_to(range.begin)
        self._before = range

    def close(self) -> None:
        """See :class:`Partition`; the consumer is closed with the source."""

    def _go_to(self, offset: int) -> None:
        self._offset = offset
        self._consumer.assign(offset)

    def _is_compared(self, timeout_s: float) -> bool:
        """Whether what was read before is compared, or is not there to be compared."""
        if self._before is None:
            return True
        range = self._before
        try:
            self._found += self._consume(range.records - len(self._found), timeout_s)
        except _Gone:
            self._found = []
            self._before = None
            self._go_to(range.end)
            return True
        if not self._are_all(self._found, range):
            return False
        if _within(self._found, range) == range.records:
            lines, _ = self._messages.lines([message.value() for message in self._found])
            check_same(range, zlib.crc32(lines))
        self._go_to(range.end)
        self._found = []
        self._before = None
        return True

    def _are_all(self, messages: list[Message], range: Range) -> bool:
        """Whether no further message can be one of a range."""
        last = _offset_of(messages[-1]) if messages else range.begin - 1
        return len(messages) == range.records or last + 1 >= range.end or self._consumer.is_at_end

    def _consume(self, most: int, timeout_s: float) -> list[Message]:
        messages = self._consumer.consume(most, timeout=timeout_s)
        if messages and (error := messages[0].error()) is not None:
            raise self._refused(error)
        return messages

    def _records(self, messages: list[Message]) -> Records:
        offsets = list(map(_offset_of, messages))
        first = offsets[0] if self._offset is None else self._offset
        lines, empty = self._messages.lines([message.value() for message in messages])
        converted = self._messages.convert(lines, 0)
        bad = {offsets[line]: reason for line, reason in (converted.bad | empty).items()}
        end = offsets[-1] + 1
        crc = zlib.crc32(lines)
        range = Range(self.name, self._place, first, end, first - 1, len(messages), crc)
        self._offset = end
        columns = self._messages.columns
        layout = self._messages.layout
        return Records(range, converted.text, columns, layout, bad, lines, numbers=offsets)

    def _refused(self, error: KafkaError) -> DataError:
        where = f"partition {self.name} of {self._place} at offset {self._offset}"
        from confluent_kafka import KafkaError

        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            return _Gone(
                f"{where}, which the brokers do not have any more: {error.str()}",
                "messages that are kept until they are trained",
                "keep them for longer, and begin a new run: events between are lost",
            )
        return DataError(f"{where}: {error.str()}", "messages", "look at the brokers")

    def _silent(self, range: Range) -> DataError:
        how = f"of which not all messages have come in {kafka_consumer.ANSWER_S:.0f} s"
        return changed(range, how)


class _Gone(DataError):
    """An offset that the brokers do not have."""


def _within(messages: list[Message], range: Range) -> int:
    """How many messages are of a range."""
    return sum(_offset_of(message) < range.end for message in messages)


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
        """A line a message, and reasons of those that are none, by their line from 0."""
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
