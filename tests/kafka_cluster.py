"""librdkafka's mock cluster as a process of its own: brokers of the real protocol, in memory."""

import ctypes
import os
import signal
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
