"""Kernels that prepare, draw and batch data, against what they mean."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.data.kernels import click_model, samples, sampling, text, vocabulary
from pibroch.data.kernels.click_model import naive as click_model_naive
from pibroch.data.kernels.samples import naive as samples_naive
from pibroch.data.kernels.sampling import naive as sampling_naive
from pibroch.data.kernels.text import naive as text_naive
from pibroch.data.kernels.vocabulary import naive as vocabulary_naive
from pibroch.kernels.fill import fill_normal, fill_uniform
from pibroch.kernels.fill import naive as fill_naive

KEY = 0xFEDCBA9876543210
BYTES = st.lists(st.sampled_from([b'"', b",", b"\n", b"\r", b"a", b" "]), max_size=20)
VALUES = st.recursive(
    st.text('a"\\[{,', max_size=4) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("a[", max_size=2), inner),
)


def packed(fields):
    ends = np.cumsum([0, *map(len, fields)])
    return np.frombuffer(b"".join(fields) + b"?", np.uint8), ends[:-1], ends[1:]


@settings(deadline=None)
@given(BYTES, st.booleans())
def test_fields_and_record_ends(parts, quotes):
    raw = b"".join(parts)
    buffer = np.frombuffer(raw, np.uint8).copy()
    bounds = np.zeros((len(raw) + 1, 21, 2), np.int64)
    records = np.zeros((len(raw) + 1, text.RECORD_ITEMS), np.int64)
    count = text.find_fields(buffer, ord(","), quotes, np.arange(21), bounds, records)
    result = [[buffer[a:b].tobytes() for a, b in bounds[i, : records[i, 2]]] for i in range(count)]
    assert result == text_naive.find_fields(raw, b",", quotes)
    end = text.complete_records_end(np.frombuffer(raw, np.uint8), ord(","))
    assert end == text_naive.complete_records_end(raw, b",")


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_what_is_read_from_fields(fields, first, ended):
    buffer, starts, ends = packed(fields)
    assert text.hash_fields(buffer, starts, ends).tolist() == text_naive.hash_fields(fields)
    bounds = zip(*text.cut_characters(buffer, starts, ends, first, first + 2), strict=True)
    cut = [text_naive.cut_characters(field, first, first + 2) for field in fields]
    assert [buffer[a:b].tobytes() for a, b in bounds] == cut
    lengths, *places = text.split_items(
        buffer, starts, ends, fields[0][0] if fields[0] else 9, ended
    )
    delimiter = fields[0][:1] or b"\t"
    items = [text_naive.split_items(field, delimiter, ended) for field in fields]
    assert lengths.tolist() == list(map(len, items))
    result = [buffer[a:b].tobytes() for a, b in zip(*places, strict=True)]
    assert result == [item for each in items for item in each]


@settings(deadline=None)
@given(st.text("0123456789.eE+- ", max_size=9))
def test_numbers_are_read(number):
    values, good = text.parse_numbers(*packed([number.encode()]))
    expected, is_good = text_naive.parse_number(number.encode())
    assert good[0] == is_good
    assert not is_good or np.isclose(values[0], expected, rtol=1e-12, atol=0, equal_nan=True)


@settings(deadline=None)
@given(VALUES)
def test_json_is_counted(value):
    body = json.dumps(value, ensure_ascii=False).encode()
    assert text.count_json(np.frombuffer(body, np.uint8)) == text_naive.count_json(body)


def test_draws():
    probabilities = np.random.default_rng(0).dirichlet(np.full(50, 0.3))
    keep, alias = sampling.alias_table(probabilities)
    assert np.allclose(sampling_naive.odds(keep, alias), probabilities, atol=1e-12)
    for first in (0, 2**40):
        numbers = sampling.uniform(np.uint64(KEY), first, 99)
        assert np.array_equal(numbers, sampling_naive.uniform(KEY, first, 99))
        ids = sampling.draw_ids(np.uint64(KEY), first, 99, keep, alias)
        assert np.array_equal(ids, sampling_naive.draw_ids(KEY, first, 99, keep, alias))


def test_codes_are_looked_up():
    random = np.random.default_rng(0)
    codes = np.unique(random.integers(0, 40, 30)).astype(np.uint64) << np.uint64(59)
    codes = np.concatenate([codes, random.integers(0, 2**63, 50).astype(np.uint64)])
    codes = random.permutation(np.unique(codes))
    slots = vocabulary.hash_table(codes, 256)
    missing = np.uint64(7)
    queries = np.concatenate([codes, codes + np.uint64(1), [missing]])
    expected = vocabulary_naive.look_up(queries, codes, 7)
    assert np.array_equal(vocabulary.look_up(queries, codes, slots, missing), expected)
    bounds = np.array([0, len(codes)]), np.array([0, 256])
    stacked = vocabulary.look_up_stacked(
        queries[None], np.zeros(1, np.int64), codes, slots, *bounds, missing
    )
    assert np.array_equal(stacked[0], expected)
    for wrong in (None, int(slots[slots >= 0][3])):
        if wrong is not None:
            slots[slots == wrong] = (wrong + 1) % len(codes)
        result = vocabulary.first_not_found(codes, slots, 0, len(codes))
        assert result == vocabulary_naive.first_not_found(codes, slots)
        assert (result == -1) == (wrong is None)


def test_samples_are_gathered():
    random = np.random.default_rng(0)
    for size in (0, 1, 40):
        chosen = random.integers(0, 50, size)
        split = (
            random.integers(0, 2, (50, 1)).astype(np.uint8),
            random.random((50, 3)).astype(np.float32),
        )
        labels = np.empty((size, 1), np.float32)
        dense = np.empty((size, 3), np.float32)
        samples.gather_samples(chosen, *split, labels, dense)
        for got, want in zip(
            (labels, dense), samples_naive.gather_samples(chosen, *split), strict=True
        ):
            assert np.array_equal(got, want)
        several = random.random((50, 2)).astype(np.float32)
        labels = np.empty((size, 2), np.float32)
        samples.gather_samples(chosen, several, split[1], labels, dense)
        assert np.array_equal(labels, several[chosen])
        ids_FB = np.empty((5, size), np.int64)
        for features, dtype in (([0, 3], np.int32), ([1, 2, 4], np.int64)):
            limits = np.iinfo(dtype)
            ids = random.integers(limits.min, limits.max, (50, len(features)), dtype)
            samples.gather_ids(chosen, ids, np.array(features), ids_FB)
            assert np.array_equal(ids_FB[features], samples_naive.gather_ids(chosen, ids))
        offsets = np.concatenate([[0], np.cumsum(random.integers(0, 4, 50))])
        values = random.integers(0, 9, offsets[-1]).astype(np.int32)
        want = samples_naive.gather_bags(chosen, values, offsets)
        out = np.empty(len(want), np.int64)
        samples.gather_bags(chosen, values, offsets, out)
        assert np.array_equal(out, want)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_falling_offsets_are_found(offsets):
    array = np.array(offsets, np.int64)
    assert samples.first_fall(array) == samples_naive.first_fall(array)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=40))
def test_numbers_that_are_not_finite_are_found(numbers):
    array = np.array(numbers, np.float32)
    assert samples.first_not_finite(array) == samples_naive.first_not_finite(array)


def test_parts_of_logits():
    random = np.random.default_rng(0)
    lengths = random.integers(0, 3, 5 * 4)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    arguments = (
        random.standard_normal((5, 3)).astype(np.float32),
        random.integers(0, 6, starts[-1]).astype(np.int32),
        starts,
        np.arange(4) * 6,
        random.standard_normal((24, 3)).astype(np.float32),
        random.random(4).astype(np.float32),
        random.random(3).astype(np.float32),
    )
    linear = np.empty(5)
    pairs = np.empty(5)
    click_model.sums(*arguments, linear, pairs)
    for got, want in zip((linear, pairs), click_model_naive.sums(*arguments), strict=True):
        assert np.allclose(got, want, atol=1e-5)


def test_fills():
    rows = np.array([0, 3, 2**33])
    weights = np.empty((3, 5), np.float32)
    fill_uniform(weights, rows, KEY, 0.5)
    assert np.allclose(weights, fill_naive.uniform(rows, 5, KEY, 0.5), rtol=1e-6)
    fill_normal(weights, rows, KEY, 2.0)
    assert np.allclose(weights, fill_naive.normal(rows, 5, KEY, 2.0), rtol=1e-5)
