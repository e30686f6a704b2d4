"""librdkafka's mock cluster as a process of its own: brokers of the real protocol, in memory."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import confluent_kafka
from confluent_kafka import Producer

ANSWER_S = 20
ALL = -1
NOBODY = -1
_BROKERS = 3
_PRODUCER = 0  # a kind of rd_kafka_t
_IS_CONTROL = 0x20
_IS_TRANSACTIONAL = 0x10


class Cluster:
    """Brokers 1, 2 and 3 that can be stopped, let go on and killed; topics have four partitions."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.brokers = self.process.stdout.readline().decode().strip()
        assert self.brokers, "brokers that have begun"
        self._producer = Producer({"bootstrap.servers": self.brokers, "linger.ms": 0})
        return self

    def __exit__(self, *_):
        self._producer.purge()
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)

    def send(self, topic, messages, partition=None):
        """Send messages ``(number, text)``, to partition ``number`` modulo 4 unless it is given."""
        for number, text in messages:
            place = number % 4 if partition is None else partition
            self._producer.produce(topic, text, partition=place)
            self._producer.poll(0)
        assert self._producer.flush(ANSWER_S) == 0

    def send_marker(self, topic, partition):
        """Have a transaction committed that has nothing; its marker takes an offset."""
        metadata = self._producer.list_topics(topic, timeout=ANSWER_S)
        broker = metadata.brokers[metadata.topics[topic].partitions[partition].leader]
        with socket.create_connection((broker.host, broker.port), ANSWER_S) as connection:
            connection.sendall(_produce(topic, partition, _marker()))
            (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            answer = connection.recv(size, socket.MSG_WAITALL)
        error = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(topic) + 4 + 4)
        assert error == (0,), (topic, partition, error)

    def set_leader(self, topic, partition, broker):
        """Have a broker lead a partition, or ``NOBODY``."""
        self._say("leader", topic, partition, broker)

    def set_down(self, broker=ALL):
        """Have a broker end its connections and take no others."""
        self._say("down", broker)

    def set_up(self, broker=ALL):
        """Have it take connections again."""
        self._say("up", broker)

    def _say(self, *words):
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"0\n", words

    def signal(self, number):
        """Stop all brokers (SIGSTOP), or let them go on (SIGCONT)."""
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait(ANSWER_S)


def _marker():
    """A batch of a control record (KIP-98), a commit, whose checksum the mock does not look at."""
    commit = struct.pack(">hh", 0, 1)
    value = struct.pack(">hi", 0, 0)
    record = b"\0\0\0" + bytes([2 * len(commit)]) + commit + bytes([2 * len(value)]) + value + b"\0"
    producer = struct.pack(">qhi", 9, 0, -1)
    last_offset, times = 0, struct.pack(">qq", 0, 0)
    batch = struct.pack(">hi", _IS_CONTROL | _IS_TRANSACTIONAL, last_offset) + times + producer
    batch += struct.pack(">i", 1) + bytes([2 * len(record)]) + record
    batch = struct.pack(">ibI", 0, 2, 0) + batch
    return struct.pack(">qi", 0, len(batch)) + batch


def _produce(topic, partition, batch):
    """A request to produce, version 3."""
    name = struct.pack(">h", len(topic)) + topic.encode()
    body = struct.pack(">hhii", -1, 1, 1000 * ANSWER_S, 1) + name
    body += struct.pack(">iii", 1, partition, len(batch)) + batch
    request = struct.pack(">hhih", 0, 3, 1, -1) + body
    return struct.pack(">i", len(request)) + request


def serve():
    """Be the brokers until nobody holds the other end of standard input; do what it says."""
    library = _library()
    owner = library.rd_kafka_new(_PRODUCER, None, None, 0)
    cluster = library.rd_kafka_mock_cluster_new(owner, _BROKERS)
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        word, *words = line.split()
        if word == "leader":
            place = words[0].encode(), int(words[1]), int(words[2])
            error = library.rd_kafka_mock_partition_set_leader(cluster, *place)
        else:
            set_state = getattr(library, f"rd_kafka_mock_broker_set_{word}")
            error = set_state(cluster, int(words[0]))
        print(error, flush=True)


def _library():
    """The librdkafka that confluent-kafka brings, whose mock cluster Python does not reach."""
    folder = Path(confluent_kafka.__file__).parent
    (path,) = folder.parent.glob("confluent_kafka.libs/librdkafka*")
    library = ctypes.CDLL(str(path))
    handle, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    for name, result, arguments in (
        ("new", handle, [ctypes.c_int, handle, text, ctypes.c_size_t]),
        ("mock_cluster_new", handle, [handle, ctypes.c_int]),
        ("mock_cluster_bootstraps", text, [handle]),
        ("mock_partition_set_leader", ctypes.c_int, [handle, text, number, number]),
        ("mock_broker_set_down", ctypes.c_int, [handle, number]),
        ("mock_broker_set_up", ctypes.c_int, [handle, number]),
    ):
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    return library


if __name__ == "__main__":
    serve()
