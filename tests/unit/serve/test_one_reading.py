"""Whatever a Parquet file holds and whatever stands on a line is encoded alike by all who read it.

Values and lines are drawn by the thousand; ``PIBROCH_SOAK_READINGS`` draws so many times more.
"""

import csv
import io
import json
import os
import random
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pibroch.data import EncodedDataset
from pibroch.data.encode import FeatureEncoder
from pibroch.data.layout import Layout
from pibroch.data.loader import batch_of
from pibroch.data.parquet import ParquetSource
from pibroch.data.parse import PieceParser
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.splits import SplitRule
from pibroch.data.values import text_of
from pibroch.score.checkpoint import open_for
from pibroch.score.split import score_split
from pibroch.serve.export import export_checkpoint
from pibroch.serve.inference_protocol import parse_infer
from pibroch.serve.inputs import work_of
from pibroch.serve.raw_body import parse_raw
from pibroch.serve.settings import Refusal
from served import serving
from small_run import make_config, train_here

TIMES = int(os.environ.get("PIBROCH_SOAK_READINGS", "1"))
ROWS = 100
ALPHABET = "ab1 ,;'\"\\\n\r\té北😀\x00-0.e"
MOMENT = datetime(1970, 1, 1)


def text(rng):
    return "".join(rng.choices(ALPHABET, k=rng.randrange(6)))


def bits(number):
    return lambda rng: rng.choice([0, 1, 7, 2**number - 1, rng.getrandbits(number)])


def signed(number):
    return lambda rng: bits(number - 1)(rng) * rng.choice([1, -1])


def real(rng):
    kinds = [
        lambda: float(rng.randrange(-99, 99)),
        lambda: rng.uniform(-1, 1) * 10.0 ** rng.randrange(-30, 30),
        lambda: round(rng.uniform(-99, 99), rng.randrange(4)),
        lambda: rng.choice(
            [0.0, -0.0, 1e-5, 9.99e-6, 1e-4, 1e16, 2.0**53, 1e15 + 0.5, float("nan")]
        ),
    ]
    return rng.choice(kinds)()


def moment(rng):
    return MOMENT + timedelta(
        seconds=rng.randrange(-(10**9), 4 * 10**9),
        microseconds=rng.choice([0, 600_000, 1, rng.randrange(10**6)]),
    )


def clock(rng):
    return time(rng.randrange(24), rng.randrange(60), rng.randrange(60), moment(rng).microsecond)


def decimal(rng):
    return Decimal(rng.choice([0, 1250, 100, -50, rng.randrange(-(10**6), 10**6)])).scaleb(-2)


def items(one):
    """Lists; none of one missing item, which a line cannot tell from an empty list."""

    def draw(rng):
        values = [one(rng) for _ in range(rng.randrange(4))]
        return [] if len(values) == 1 and values[0] != values[0] else values

    return draw


def word(rng):
    return rng.choice(["a", "é", "北京", "a b", "1", "0.5"])


NUMBERS = {
    "int8": (pl.Int8, signed(8)),
    "int64": (pl.Int64, signed(64)),
    "uint8": (pl.UInt8, bits(8)),
    "uint64": (pl.UInt64, bits(64)),
    "float32": (pl.Float32, real),
    "float64": (pl.Float64, real),
    "bool": (pl.Boolean, lambda rng: rng.random() < 0.5),
    "decimal": (pl.Decimal(38, 2), decimal),
}
"""Types that are read as numbers, too."""
SINGLE = NUMBERS | {
    "int16": (pl.Int16, signed(16)),
    "int32": (pl.Int32, signed(32)),
    "int128": (pl.Int128, signed(127)),
    "uint16": (pl.UInt16, bits(16)),
    "uint32": (pl.UInt32, bits(32)),
    "infinite": (pl.Float64, lambda rng: rng.choice([float("inf"), float("-inf"), 1.0])),
    "text": (pl.String, text),
    "categorical": (pl.Categorical, word),
    "enum": (pl.Enum(["a", "北"]), lambda rng: rng.choice("a北")),
    "binary": (pl.Binary, lambda rng: text(rng).encode()),
    "null": (pl.Null, lambda rng: None),
    "date": (pl.Date, lambda rng: date(1970, 1, 1) + timedelta(days=rng.randrange(-9999, 99999))),
    "time": (pl.Time, clock),
    "milliseconds": (
        pl.Datetime("ms"),
        lambda rng: moment(rng).replace(microsecond=600_000 * rng.randrange(2)),
    ),
    "microseconds": (pl.Datetime("us"), moment),
    "nanoseconds": (pl.Datetime("ns"), moment),
    "utc": (pl.Datetime("us", "UTC"), lambda rng: moment(rng).replace(tzinfo=UTC)),
    "zoned": (pl.Datetime("us", "Asia/Kathmandu"), lambda rng: moment(rng).replace(tzinfo=UTC)),
}
LISTS = {
    "ints": (pl.List(pl.Int64), items(signed(64))),
    "floats": (pl.List(pl.Float32), items(real)),
    "words": (pl.List(pl.String), items(word)),
    "moments": (pl.List(pl.Datetime("us")), items(moment)),
    "pair": (pl.Array(pl.Float64, 2), lambda rng: [real(rng), 0.1]),
}
COLUMNS = list(SINGLE | LISTS)
TOML = (
    'label = "y"\n'
    + "".join(
        f'[dense.{name}]\n[categorical.{name}_bin]\ncolumn = "{name}"\nbinning = "log"\n'
        for name in NUMBERS
    )
    + "".join(f"[categorical.{name}]\nmin_count = 1\n" for name in SINGLE)
    + "".join(f"[categorical.{name}]\nmin_count = 1\nmulti_hot = true\n" for name in LISTS)
    + '[categorical.part]\ncolumn = "text"\ncharacters = [1, 3]\nencoding = "hash"\nnum_buckets ='
    " 1000\n" + '[categorical.place]\ncolumn = "uint8"\nencoding = "integer"\nnum_buckets = 200\n'
)
SCHEMA = Schema.from_toml(TOML)


def prepared(folder, rng, split="none", schema=SCHEMA):
    """A Parquet file of all types, and the dataset made of it."""
    columns = {"y": pl.Series([row % 2 for row in range(ROWS)])}
    for name, (kind, draw) in (SINGLE | LISTS).items():
        share = rng.choice([0, 0.2])
        values = [None if rng.random() < share else draw(rng) for _ in range(ROWS)]
        columns[name] = pl.Series(name, values, dtype=kind, strict=name != "float32")
    frame = pl.DataFrame(columns)
    frame.write_parquet(folder / "t.parquet")
    options = PrepareOptions(SplitRule.parse(split), overwrite=True)
    prepare([ParquetSource(folder / "t.parquet", schema)], schema, folder / "set", options)
    return pl.read_parquet(folder / "t.parquet"), EncodedDataset.open(folder / "set")


def in_json(value):
    """As the documentation says that JSON holds it."""
    if isinstance(value, list):
        return [in_json(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) != float("inf") else str(value)
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return value.decode() if isinstance(value, bytes) else value.isoformat()


def as_line(values):
    """Values as a field of a line: their text."""
    if isinstance(values, list):
        return "|".join(text_of(item).decode() for item in values)
    return text_of(values).decode()


def bodies(frame):
    """The same samples as JSON rows, JSON columns and lines: body and its type."""
    rows = frame.select(COLUMNS).to_dicts()
    plain = [{name: in_json(value) for name, value in row.items()} for row in rows]
    by_column = {name: [row[name] for row in plain] for name in COLUMNS}
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([as_line(value) for value in row.values()] for row in rows)
    return [
        (json.dumps({"rows": plain}).encode(), "application/json"),
        (json.dumps({"columns": by_column}).encode(), "application/json"),
        (lines.getvalue().encode(), "text/csv"),
    ]


KINDS = {
    pl.Int8: "INT8",
    pl.Int16: "INT16",
    pl.Int32: "INT32",
    pl.Int64: "INT64",
    pl.UInt8: "UINT8",
    pl.UInt16: "UINT16",
    pl.UInt32: "UINT32",
    pl.UInt64: "UINT64",
    pl.Float32: "FP32",
    pl.Float64: "FP64",
    pl.Boolean: "BOOL",
}


def tensors(frame):
    """The same samples as a request of the inference protocol.

    Typed tensors where a column has no gaps, else texts.
    """
    head = []
    data = []
    for name in COLUMNS:
        series = frame[name]
        kind = KINDS.get(series.dtype)
        if kind is None or series.null_count():
            kind = "BYTES"
            texts = [as_line(value).encode() for value in series.to_list()]
            part = b"".join(len(each).to_bytes(4, "little") + each for each in texts)
        else:
            part = series.to_numpy().tobytes()
        head.append(
            {
                "name": name,
                "shape": [len(series)],
                "datatype": kind,
                "parameters": {"binary_data_size": len(part)},
            }
        )
        data.append(part)
    request = json.dumps({"inputs": head}).encode()
    return request + b"".join(data), str(len(request))


def expect(batch, dataset):
    """A batch is what preparation made of the same samples."""
    trained = batch_of(dataset.split("train"), np.arange(ROWS))
    assert np.array_equal(batch.offsets, trained.offsets)
    for name in batch.keys:
        one = batch.select((name,))
        other = trained.select((name,))
        assert one.values.tolist() == other.values.tolist(), name
    assert np.array_equal(batch.dense, trained.dense)
    unknown = {name: (trained.select((name,)).values == 0).sum() for name in COLUMNS}
    assert not any(unknown.values()), unknown


@pytest.mark.parametrize("schema", [SCHEMA, SCHEMA.with_changes(raw=True)], ids=["rows", "raw"])
@settings(
    max_examples=4 * TIMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_value_of_every_type_is_read_alike(tmp_path, schema, seed):
    """Some 4,000 values a draw, by eight ways."""
    frame, dataset = prepared(tmp_path, random.Random(seed), schema=schema)
    arrays = {
        name: frame[name].to_numpy()
        if frame[name].dtype in KINDS and not frame[name].null_count()
        else frame[name].to_list()
        for name in COLUMNS
    }
    arrays["nanoseconds"] = frame["nanoseconds"].to_numpy()
    typed = frame.to_dict(as_series=False), frame.to_dict(as_series=True), arrays
    for columns in typed:
        raw = {name: columns[name] for name in COLUMNS}
        expect(batch_from_raw(dataset.schema, dataset.encoders, raw), dataset)
    for body, kind in bodies(frame):
        raw = parse_raw(body, kind, dataset.schema, COLUMNS)
        expect(batch_from_raw(dataset.schema, dataset.encoders, raw), dataset)
    body, length = tensors(frame)
    model = SimpleNamespace(schema=dataset.schema, columns=COLUMNS)
    raw = work_of(parse_infer(body, length, ("score",)).inputs, model)
    expect(batch_from_raw(dataset.schema, dataset.encoders, raw), dataset)


LINES = Schema.from_toml(
    'label = "y"\n[categorical.a]\nencoding = "hash"\nnum_buckets = 1000000\n'
    '[categorical.b]\nencoding = "hash"\nnum_buckets = 1000000\nmulti_hot = true\n'
    '[categorical.raw_a]\ncolumn = "a"\nencoding = "raw"\n'
    '[categorical.raw_b]\ncolumn = "b"\nencoding = "raw"\nmulti_hot = true\n'
)


def field(rng, wild):
    """A field as preparation takes it, or one that it may not."""
    drawn = "".join(rng.choices('aab1é ,\t"\r\n|', k=rng.randrange(7)))
    quoted = '"' + drawn.replace('"', '""') + '"'
    plain = rng.choice(["a", "b|a", "", " ", "é\r", '5" b'])
    return rng.choice([quoted, plain, drawn] if wild else [quoted, plain])


def line_texts(rng):
    ends = rng.choice(["\n", "\r\n", "\r\r\n"])
    wild = rng.random() < 0.3
    lines = [
        ",".join([rng.choice("01"), field(rng, wild), field(rng, wild)])
        for _ in range(rng.randrange(1, 5))
    ]
    return ends.join(lines) + rng.choice(["", ends])


@settings(max_examples=6 * TIMES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_line_is_read_alike(seed):
    """Some 2,500 lines a draw; what preparation leaves out is refused."""
    rng = random.Random(seed)
    num_read = 0
    num_refused = 0
    parser = PieceParser(LINES, ("y", "a", "b"), Layout(",", True))
    encoders = {feature.name: FeatureEncoder(feature) for feature in LINES.categorical}
    for _ in range(1000):
        body = line_texts(rng).encode()
        parsed = parser.parse(body)
        try:
            raw = parse_raw(b"y,a,b\n" + body, "text/csv", LINES, ["a", "b"])
        except Refusal:
            assert parsed.num_bad or not len(parsed.labels), body
            num_refused += 1
            continue
        if parsed.num_bad:  # a server looks at no label, and does without
            reasons = [bad.reason for bad in parsed.bad]
            assert all("a label must" in each or "2 columns" in each for each in reasons), (
                body,
                reasons,
            )
            continue
        if not raw["a"]:
            continue
        batch = batch_from_raw(LINES, encoders, raw)
        codes = [
            encoders[f.name].ids(c.values)
            for f, c in zip(LINES.categorical, parsed.codes, strict=True)
        ]
        assert batch.values.tolist() == np.concatenate(codes).tolist(), body
        num_read += 1
    assert num_read > 300 and num_refused > 10


def test_all_of_it_through_files_processes_and_sockets(tmp_path):
    """The scores that ``pibroch predict`` writes are those of each way to ask a server."""
    frame, dataset = prepared(tmp_path, random.Random(7), "time:0.5/0.25/0.25")
    config = make_config(dataset.path, "train.steps=3", "train.batch_size=16")
    run, _ = train_here(config, tmp_path / "run")
    predictor, checkpoint = open_for(run.path, dataset)
    score_split(predictor, checkpoint, dataset, "test", tmp_path / "scores.parquet")
    scores = pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy()
    tested = frame.tail(len(scores))
    typed = {name: tested[name].to_list() for name in COLUMNS}
    assert np.abs(predictor.score_raw(typed).numpy() - scores).max() < 1e-6
    export_checkpoint(run.path, tmp_path / "ctr")
    with serving(tmp_path / "ctr") as server:
        for body, kind in bodies(tested):
            answer = server.ask("POST", "/score", body, {"content-type": kind})
            assert np.abs(np.array(answer.json["scores"]) - scores).max() < 1e-6
        body, length = tensors(tested)
        headers = {"inference-header-content-length": length}
        answer = server.ask("POST", "/v2/models/ctr/infer", body, headers)
        assert np.abs(np.array(answer.json["outputs"][0]["data"]) - scores).max() < 1e-6
