"""Every form in which a batch travels or is kept carries any id, weight, time and label.

A form is a function that makes it and reads it again; beside it stands which fields it carries.
"""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
import torch

from pibroch.data import EncodedDataset, JaggedBatch, Loader, LoaderPosition
from pibroch.data.batch import Assigned, one_hot_offsets
from pibroch.data.schema import Schema
from pibroch.data.streams.decode import Decoder
from pibroch.data.writer import DatasetWriter, EncodedRows
from pibroch.exchange.step_ids import OwnIds, event_runs_of, feature_bounds, gathered
from pibroch.exchange.towers.peer_lookup import kind_of, packed, unpacked
from pibroch.processors.source import from_plain, to_plain
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.codec import Codec
from pibroch.serve.inputs import _batch_of, encoded_tensors, merged_batches
from pibroch.torchrec import KeyedJaggedTensor
from pibroch.train.accumulation import _parts

LARGEST = 2**63 - 1
NUM_CITIES = 2**31 - 8
SCHEMA = """
labels = ["click", "seconds"]
weight = "importance"
group = "session"
time = "at"
time_unit = "ms"

[target.click]
kind = "number"
[target.seconds]
kind = "number"

[dense.age]
transform = "identity"
[dense.price]
transform = "identity"
[categorical.user]
encoding = "raw"
[categorical.city]
encoding = "hash"
num_buckets = 2147483640
[categorical.tags]
encoding = "raw"
multi_hot = true
"""
KEYS = ("user", "city", "tags")
SAMPLES = ("dense", "labels", "sample_weights", "groups", "event_times")
IDS = ("keys", "values", "offsets")


def batch_of_extremes(one_hot=False, weighted=False):
    """Four samples: ids of 63 bits beside small ones, empty bags, numbers that are none."""
    user = [0, LARGEST, 2**32 + 1, 2**31]
    city = [0, 2**31 - 9, 1, 2]
    tags = [7, LARGEST - 1, LARGEST] if not one_hot else [LARGEST - 1, 2**40, 0, 2**53 + 1]
    lengths = [1] * 8 + ([0, 2, 0, 1] if not one_hot else [1] * 4)
    values = torch.tensor(user + city + tags)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    number = np.float32(np.finfo(np.float32).tiny) / 2
    weights = torch.tensor([-0.0, 1e-45, 3.4e38, -2.5, *[0.1] * (len(values) - 4)])
    return JaggedBatch(
        torch.tensor([[-0.0, np.nan], [np.inf, -1e-45], [-3.4e38, number], [0.1, -np.inf]]),
        KEYS,
        values,
        one_hot_offsets(12) if one_hot else offsets,
        torch.tensor([[1.0, -0.0], [0.0, -3.5e-42], [1.0, 3.3e38], [0.0, np.nan]]),
        weights if weighted else None,
        LoaderPosition(2**40, 4),
        sample_weights=torch.tensor([0.0, 0.5, 2.5, 1.0]),
        groups=torch.tensor([-(2**63), LARGEST, 0, -1]),
        event_times=torch.tensor([-(2**62), 1_760_000_000_123, LARGEST, 0]),
    )


BATCHES = {
    "bags": batch_of_extremes(),
    "one id a bag": batch_of_extremes(one_hot=True),
    "weights": batch_of_extremes(weighted=True),
    "small ids": replace(batch_of_extremes(), values=torch.arange(11)),
    "one label": replace(batch_of_extremes(), labels=torch.tensor([0.0, 1.0, -0.0, 0.5])),
    "nothing but features": JaggedBatch.from_one_hot(
        torch.empty(2, 0), KEYS, torch.tensor([[LARGEST, 0]] * 3), torch.zeros(2)
    ),
    "no samples": JaggedBatch.from_one_hot(
        torch.empty(0, 2), KEYS, torch.empty(3, 0, dtype=torch.int64), torch.zeros(0)
    ),
    "assigned": replace(
        batch_of_extremes(), assigned=Assigned(np.array([0, 3, 2**33, LARGEST]), 2**40, 3)
    ),
    "id by id": replace(batch_of_extremes(weighted=True), by_id=True, first_sample=2**33),
}


def codec(*names):
    return Codec(Callables(("os", *names)))


def over_wire(value, *names):
    raw, tensors, references = codec(*names).encode(value)
    sent = [tensor.clone() for tensor in tensors]
    return codec(*names).decode(msgspec.Raw(bytes(raw)), sent, references)


def by_processor(batch, tmp_path):
    return from_plain(over_wire(to_plain(batch, batch.has_shared_offsets)), batch.keys)


def by_rpc(batch, tmp_path):
    classes = (JaggedBatch, LoaderPosition, Assigned)
    return over_wire(batch, *(f"{each.__module__}:{each.__qualname__}" for each in classes))


def by_towers(batch, tmp_path):
    message = packed(batch, kind_of(batch), np.int64)
    return unpacked(message, batch.batch_size, kind_of(batch), batch.keys, np.int64)


def by_passes(batch, tmp_path):
    parts = list(_parts(batch, 3))
    joined = {
        name: None if getattr(batch, name) is None else torch.cat([getattr(p, name) for p in parts])
        for name in SAMPLES
    }
    assert all(part.position == batch.position and part.by_id == batch.by_id for part in parts)
    return replace(batch, **joined)


def by_keyed_jagged(batch, tmp_path):
    keyed = KeyedJaggedTensor(batch.keys, batch.values, batch.weights, offsets=batch.offsets)
    parts = KeyedJaggedTensor.concat(keyed.split([1, 2])).permute([2, 0, 1]).permute([1, 2, 0])
    return JaggedBatch.from_keyed_jagged(parts, batch.dense, batch.labels)


def by_announced_ids(batch, tmp_path):
    runs = event_runs_of(batch, 1)
    own = OwnIds(batch.values.numpy(), feature_bounds(batch), True, runs)
    other = OwnIds(np.empty(0, np.int64), [0] * 4, False, runs[:0])
    step, places = gathered([other.message, own.message], 3)
    assert step.event_runs.tolist() == runs.tolist() and step.is_real
    assert int(step.counts.sum()) == len(batch.values)
    return replace(batch, values=torch.from_numpy(own.rows_in(step.ids, places[1])))


def by_picking(batch, tmp_path):
    return batch.pick(KEYS[2:] + KEYS[:2]).pick(KEYS)


def by_joined_requests(batch, tmp_path):
    parts = [sample_of(batch, sample) for sample in range(4)]
    return merged_batches(parts)


def sample_of(batch, sample):
    """One sample of a batch, as a request of its own."""
    bags = [batch.values[slice(*batch.offsets[4 * f + sample :][:2])] for f in range(3)]
    ends = torch.tensor([0, *map(len, bags)]).cumsum(0)
    here = slice(sample, sample + 1)
    return JaggedBatch(batch.dense[here], KEYS, torch.cat(bags), ends, torch.zeros(1))


def by_named_tensors(batch, tmp_path):
    """As the Open Inference Protocol has them."""
    tensors = encoded_tensors(Schema.from_toml(SCHEMA), batch)
    return _batch_of({name: t.numpy() for name, t in tensors.items()}, Schema.from_toml(SCHEMA))


def rows_of(batch):
    """Samples as preparation writes them."""
    ids = [batch.values[batch.offsets[4 * f] : batch.offsets[4 * f + 4]].numpy() for f in range(3)]
    return EncodedRows(
        batch.labels.numpy(),
        batch.dense.numpy(),
        ids[1][:, None].astype(np.int32),
        {"tags": (batch.lengths()[8:].numpy(), ids[2])},
        ids[0][:, None],
        batch.sample_weights.numpy(),
        batch.groups.numpy().view(np.uint64),
        batch.event_times.numpy(),
    )


def by_dataset(batch, tmp_path):
    rows = rows_of(batch)
    writer = DatasetWriter(tmp_path, Schema.from_toml(SCHEMA))
    for first, end in ((0, 1), (1, 1), (1, 4)):
        writer.append("test", rows.between(first, end))
    for read in writer.read("test"):
        writer.append("train", read.chosen(np.array([True] * 4)))
    writer.finish({"user": None, "city": NUM_CITIES + 2, "tags": None}, {})
    return next(iter(Loader(EncodedDataset.open(tmp_path).split("train"), 4)))


def by_stream(batch, tmp_path):
    """As a stream joins samples of several ranges, without what its batches get from steps."""
    decoder = Decoder(Schema.from_toml(SCHEMA), {})
    rows = rows_of(batch)
    joined = decoder.joined([rows.between(0, 1), rows.between(1, 1), rows.between(1, 4)])
    assert joined.sample_weights.tobytes() == rows.sample_weights.tobytes()
    assert joined.groups.tobytes() == rows.groups.tobytes()
    assert joined.event_times.tobytes() == rows.event_times.tobytes()
    return decoder.batch(joined)


ALL = tuple(field.name for field in fields(JaggedBatch))
FORMS = {
    by_processor: ALL,
    by_rpc: ALL,
    by_passes: ALL,
    by_picking: ALL,
    by_announced_ids: IDS,
    by_towers: (*IDS, "weights", "by_id"),
    by_keyed_jagged: (*IDS, "weights", "dense", "labels"),
}
OF_REQUESTS = (by_joined_requests, by_named_tensors)
OF_SCHEMA = {by_dataset: (*IDS, *SAMPLES), by_stream: (*IDS, "dense", "labels")}
"""Forms of samples that a schema describes."""


def bits(value):
    """All that a field holds, so that -0.0 is not 0.0 and NaN is itself."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, Assigned):
        return value.places.tobytes(), value.transfers, value.transfers_given
    return type(value), value


def check(form, batch, names, tmp_path):
    got = form(batch, tmp_path)
    got.validate()
    for name in names:
        assert bits(getattr(got, name)) == bits(getattr(batch, name)), name


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_carries_every_number(form, kind, tmp_path):
    check(form, BATCHES[kind], FORMS[form], tmp_path)


@pytest.mark.parametrize("kind", ["bags", "one id a bag", "small ids"])
@pytest.mark.parametrize("form", OF_REQUESTS, ids=lambda form: form.__name__)
def test_a_form_of_requests_carries_every_id(form, kind, tmp_path):
    batch = BATCHES[kind]  # requests with a dense feature that is no number are refused
    check(form, replace(batch, dense=torch.nan_to_num(batch.dense)), (*IDS, "dense"), tmp_path)


@pytest.mark.parametrize("kind", ["bags", "one id a bag"])
@pytest.mark.parametrize("form", OF_SCHEMA, ids=lambda form: form.__name__)
def test_what_is_kept_by_schema_carries_every_number(form, kind, tmp_path):
    check(form, BATCHES[kind], OF_SCHEMA[form], tmp_path)


def test_small_ids_travel_in_four_bytes():
    plain = to_plain(BATCHES["small ids"], is_one_hot=False)
    assert plain["values"].dtype == torch.int32
    assert to_plain(BATCHES["one id a bag"], is_one_hot=True)["offsets"] is None
