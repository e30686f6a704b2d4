"""librdkafka's mock cluster as a process of its own: brokers of the real protocol, in memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from confluent_kafka import Producer

ANSWER_S = 20


class Cluster:
    """Brokers that can be stopped, let go on and killed; topics have four partitions."""

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

    def signal(self, number):
        """Stop all brokers (SIGSTOP), or let them go on (SIGCONT)."""
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait(ANSWER_S)


def serve():
    """Be the brokers until nobody holds the other end of standard input."""
    cluster = Producer({"bootstrap.servers": "in-memory", "test.mock.num.brokers": 3})
    brokers = cluster.list_topics(timeout=ANSWER_S).brokers.values()
    print(",".join(f"{each.host}:{each.port}" for each in brokers), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve()
