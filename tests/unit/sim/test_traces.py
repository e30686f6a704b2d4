"""Chakra traces of predicted steps, read by what the schema says of the wire."""

import json
from collections import defaultdict

import pytest

from pibroch.sim.prediction import STEPS_RUN

COMPUTES, SENDS = 4, 7


def varint(data, place):
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def fields(data):
    """Of a message in protobuf's encoding: numbers, texts and messages by field number."""
    found = defaultdict(list)
    place = 0
    while place < len(data):
        key, place = varint(data, place)
        value, place = varint(data, place)
        if key & 7 == 2:
            value, place = data[place : place + value], place + value
        found[key >> 3].append(value)
    return found


def attributes(encoded):
    return {
        each[1][0].decode(): next(each[kind][0] for kind in (9, 27, 29) if kind in each)
        for each in map(fields, encoded)
    }


def nodes_of(path):
    data = path.read_bytes()
    messages = []
    place = 0
    while place < len(data):
        size, place = varint(data, place)
        messages.append(fields(data[place : place + size]))
        place += size
    return messages


def numbers(packed):
    found = []
    for data in packed:
        place = 0
        while place < len(data):
            value, place = varint(data, place)
            found.append(value)
    return found


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead", "towers"])
def test_a_file_a_rank_has_all_work_and_messages(simulate, tmp_path, exchange):
    more = ["--utilisation", "0.01", "--set", f"embedding.exchange={exchange}"]
    if exchange == "lookahead":
        more += ["--set", "embedding.exchange.lookahead=3"]
    code, output, notes = simulate("--json", "--hosts", "3", "--traces", tmp_path / "traces", *more)
    assert code == 0, notes
    told = json.loads(output)[0]
    sent = []
    for rank in range(3):
        first, *nodes = nodes_of(tmp_path / "traces" / f"{rank}.et")
        assert f"rank {rank} of 3" in attributes(first[2])["generator"].decode()
        known = [each[1][0] if 1 in each else 0 for each in nodes]
        assert known == list(range(len(nodes)))
        for number, each in enumerate(nodes):
            assert all(before < number for before in numbers(each[5]))
        assert {each[3][0] for each in nodes} == {COMPUTES, SENDS}
        times = sum(each[7][0] for each in nodes if each[3][0] == COMPUTES and 7 in each)
        assert 0 < times / STEPS_RUN / 1e6 < 3 * told["step_seconds"]
        found = [attributes(each[10]) for each in nodes if each[3][0] == SENDS]
        assert all(each["comm_type"] in (0, 6) for each in found)
        ring = 4 / 3  # of a sum over three ranks each sends so much
        sent.append(sum(each["comm_size"] * (1 if each["comm_type"] else ring) for each in found))
    # of one exchange more than steps, as rows of the next are fetched
    assert sum(sent) / 3 / STEPS_RUN == pytest.approx(told["sent_bytes_per_rank"], rel=0.12)


def test_traces_of_several_numbers_of_hosts_or_over_others_are_refused(simulate, tmp_path):
    code, _, notes = simulate("--hosts", "2..4", "--traces", tmp_path / "traces")
    assert code == 2 and "need: one number" in " ".join(notes.split())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "0.et").write_text("mine")
    code, _, notes = simulate("--hosts", "2", "--traces", tmp_path / "there")
    assert code == 2 and "a new or an empty folder" in " ".join(notes.split())
    assert (tmp_path / "there" / "0.et").read_text() == "mine"
