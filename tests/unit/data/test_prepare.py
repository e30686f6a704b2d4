import gzip
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import zstandard

from pibroch.data.dataset import EncodedDataset
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import avazu_schema, criteo_schema
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.data.transform import log_bin_rows
from pibroch.data.writer import LINES
from pibroch.errors import DataError, StorageError

RUN = """
import sys
from pathlib import Path
from pibroch.data.parquet import ParquetSource
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.presets import criteo_schema
from pibroch.data.sources import TextSource
schema = criteo_schema()
source = TextSource(Path(sys.argv[1]), schema.separator, schema.quotes, schema.columns)
options = PrepareOptions(piece_bytes=int(sys.argv[3]), count_memory_codes=int(sys.argv[4]))
tell = lambda stage, fraction: print(stage, fraction, flush=True)
prepare([source], schema, Path(sys.argv[2]), options, tell)
"""
WAITING_FOR_A_LINE = RUN.replace("flush=True)", "flush=True) or input()")  # after each of its own


def contents(path: Path, but: str = "") -> dict[str, bytes]:
    """All files of a dataset but the manifest, which holds the time, and those of one name."""
    files = [file for file in sorted(path.glob("*/*")) if file.name != but]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_the_whole_path_against_plain_python(prepare_criteo, criteo_file, criteo_lines, tmp_path):
    report = prepare_criteo(criteo_file)
    dataset = EncodedDataset.open(tmp_path / "dataset")
    dataset.verify()
    assert report.samples == dataset.samples == {"train": 1400, "validation": 300, "test": 300}
    assert not (tmp_path / "dataset.partial").exists()
    records = [line.split("\t") for line in criteo_lines]
    train = dataset.split("train")
    test = dataset.split("test")
    np.testing.assert_array_equal(train.labels, [int(record[0]) for record in records[:1400]])
    for place, key in enumerate(dataset.schema.keys):
        column = criteo_schema().columns.index(key.removesuffix("_bin"))
        values = [record[column] for record in records]
        if key.endswith("_bin"):
            numbers = np.array([float(value) if value else math.nan for value in values])
            np.testing.assert_array_equal(test.ids[:, place], log_bin_rows(numbers)[1700:])
            continue
        counts = Counter(value for value in values[:1400] if value)
        kept = [value for value, count in counts.items() if count >= 2]
        assert dataset.num_rows[key] == len(kept) + 2
        accesses = dataset.access_counts(key)
        assert accesses[2:].tolist() == sorted((counts[value] for value in kept), reverse=True)
        assert accesses[1] == values[:1400].count("")
        assert accesses.sum() == 1400
        row_of = dict(zip(values[:1400], train.ids[:, place].tolist(), strict=True))
        assert [row_of[value] for value in kept] == sorted(row_of[value] for value in kept) or len(
            set(counts.values())
        ) > 1
        expected = [1 if not v else row_of[v] if counts[v] >= 2 else 0 for v in values[1700:]]
        assert test.ids[:, place].tolist() == expected
        assert all(counts[value] == accesses[row_of[value]] for value in kept)
    dense = [
        [math.copysign(math.log1p(abs(float(v))), float(v)) if v else 0.0 for v in r[1:14]]
        for r in records[1400:1700]
    ]
    np.testing.assert_allclose(dataset.split("validation").dense, dense, rtol=1e-6)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_compression_pieces_and_memory_change_nothing(prepare_criteo, criteo_file, tmp_path, kind):
    prepare_criteo(criteo_file, tmp_path / "a", piece_bytes=1 << 25)
    packed = tmp_path / "packed"
    data = criteo_file.read_bytes()
    packed.write_bytes(gzip.compress(data) if kind == "gzip" else zstandard.compress(data))
    prepare_criteo(packed, tmp_path / "b", piece_bytes=10_000, count_memory_codes=100)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (
        EncodedDataset.open(tmp_path / "a").fingerprint
        == EncodedDataset.open(tmp_path / "b").fingerprint
    )


def test_several_files_are_one_stream(prepare_criteo, criteo_file, criteo_lines, tmp_path):
    prepare_criteo(criteo_file, tmp_path / "whole")
    schema = criteo_schema()
    parts = [tmp_path / "1", tmp_path / "2"]
    parts[0].write_text("\n".join(criteo_lines[:777]))
    parts[1].write_text("\n".join(criteo_lines[777:]))
    sources = [TextSource(part, schema.separator, schema.quotes, schema.columns) for part in parts]
    prepare(sources, schema, tmp_path / "parts", PrepareOptions(piece_bytes=30_000))
    assert contents(tmp_path / "whole", LINES) == contents(tmp_path / "parts", LINES)


@pytest.mark.parametrize("stage", ["parse 0.", "count 0.5", "encode 0."])
def test_killed_anywhere_it_goes_on_to_the_same_bits(prepare_criteo, criteo_file, tmp_path, stage):
    prepare_criteo(criteo_file, tmp_path / "undisturbed", piece_bytes=20_000)
    command = [sys.executable, "-c", WAITING_FOR_A_LINE]
    command += [str(criteo_file), str(tmp_path / "killed"), "20000", "4000000"]
    victim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert victim.stdin is not None and victim.stdout is not None
    seen = 0
    for line in victim.stdout:
        seen += line.startswith(stage)
        if seen == 2:
            victim.send_signal(signal.SIGKILL)
            break
        victim.stdin.write("\n")
        victim.stdin.flush()
    victim.communicate(timeout=60)
    assert seen == 2
    assert not (tmp_path / "killed").exists()
    spooled = sorted((tmp_path / "killed.partial" / "spool").glob("*.npz"))
    before = {path: path.stat().st_mtime_ns for path in spooled[: seen - 1]}
    stages: list[str] = []
    schema = criteo_schema()
    source = TextSource(criteo_file, schema.separator, schema.quotes, schema.columns)

    def unchanged(name: str, fraction: float) -> None:
        stages.append(name)
        assert all(path.stat().st_mtime_ns == at for path, at in before.items()), (
            "finished pieces are reused"
        )

    prepare([source], schema, tmp_path / "killed", PrepareOptions(piece_bytes=20_000), unchanged)
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")
    assert ("parse" in stages) == stage.startswith("parse")


def test_another_schema_does_not_reuse_an_interrupted_run(prepare_criteo, criteo_file, tmp_path):
    bad = tmp_path / "bad"
    bad.write_text(criteo_file.read_text() + "broken\n")
    with pytest.raises(DataError):
        prepare_criteo(bad, tmp_path / "out")
    assert (tmp_path / "out.partial" / "spool").exists()
    prepare_criteo(bad, tmp_path / "out", schema=criteo_schema(bins=False), max_bad_fraction=0.01)
    assert len(EncodedDataset.open(tmp_path / "out").schema.keys) == 26


def test_a_file_that_was_written_anew_is_read_anew(prepare_criteo, criteo_file, tmp_path):
    """Of the same size and the same time of modification: no piece of the old one stays."""

    def cut_off(stage: str, fraction: float) -> None:
        raise KeyboardInterrupt

    old = criteo_file.read_bytes()
    before = criteo_file.stat()
    schema = criteo_schema()
    source = TextSource(criteo_file, schema.separator, schema.quotes, schema.columns)
    options = PrepareOptions(piece_bytes=50_000)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], schema, tmp_path / "resumed", options, cut_off)
    criteo_file.write_bytes(b"".join(reversed(old.splitlines(keepends=True))))
    os.utime(criteo_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert criteo_file.stat().st_size == before.st_size
    prepare_criteo(criteo_file, tmp_path / "resumed")
    prepare_criteo(criteo_file, tmp_path / "fresh")
    assert contents(tmp_path / "resumed") == contents(tmp_path / "fresh")


def test_two_processes_do_not_work_in_one_folder(prepare_criteo, criteo_file, tmp_path):
    command = [
        sys.executable,
        "-c",
        RUN,
        str(criteo_file),
        str(tmp_path / "out"),
        "20000",
        "4000000",
    ]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()
    other.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DataError, match="another process"):
            prepare_criteo(criteo_file, tmp_path / "out")
    finally:
        other.kill()
        other.wait(timeout=60)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\t3", "3 columns instead of 40"),
        ("7" + "\t" * 39, "`7` as label"),
        ("1\tabc" + "\t" * 38, "`abc` as I1"),
        ("1\tnan" + "\t" * 38, "`nan` as I1"),
    ],
)
def test_a_malformed_line_stops_by_default_and_is_counted_on_request(
    prepare_criteo, criteo_file, tmp_path, line, message
):
    with criteo_file.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=rf"line 2001: .*{message}.*need.*do:"):
        prepare_criteo(criteo_file)
    assert not (tmp_path / "dataset").exists()
    report = prepare_criteo(criteo_file, max_bad_fraction=0.001)
    assert report.num_bad == 1
    assert message in report.bad[0]
    assert sum(report.samples.values()) == 2000


def test_files_that_are_refused_leave_no_descriptor_open(tmp_path):
    # hashed, so that samples are written while they are read
    schema = Schema.from_toml(
        'label = "y"\n[dense.n]\n[categorical.c]\nencoding = "hash"\nnum_buckets = 100\n'
    )
    path = tmp_path / "clicks.csv"
    path.write_text("y,n,c\n" + "".join(f"0,{n},red\n" for n in range(50)) + "1,2,3,4\n")
    source = TextSource(path, schema.separator, schema.quotes)
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(DataError, match="1 malformed"):
            prepare([source], schema, tmp_path / "dataset", PrepareOptions())
    assert len(os.listdir("/dev/fd")) <= before + 1


def test_a_file_of_another_format_fails_after_its_first_piece(prepare_criteo, tmp_path):
    path = tmp_path / "other"
    path.write_text("a,b,c\n" * 100_000)
    with pytest.raises(DataError, match="1 columns instead of 40") as caught:
        prepare_criteo(path)
    assert "8333 malformed" in caught.value.got, "of 600 kB only one piece of 50 kB was read"


def test_nothing_usable_fails_even_when_all_may_be_malformed(prepare_criteo, tmp_path):
    path = tmp_path / "blank"
    path.write_text("\n\n\n")
    with pytest.raises(DataError, match="at least one"):
        prepare_criteo(path)
    path.write_text("x\ny\n")
    with pytest.raises(DataError, match="2 malformed of 2"):
        prepare_criteo(path, max_bad_fraction=1.0)


def test_an_existing_dataset_is_kept_unless_told_otherwise(prepare_criteo, criteo_file, tmp_path):
    prepare_criteo(criteo_file)
    before = contents(tmp_path / "dataset")
    with pytest.raises(DataError, match="--overwrite"):
        prepare_criteo(criteo_file, schema=criteo_schema(bins=False))
    assert contents(tmp_path / "dataset") == before
    prepare_criteo(criteo_file, schema=criteo_schema(bins=False), overwrite=True)
    assert len(EncodedDataset.open(tmp_path / "dataset").schema.keys) == 26
    assert {path.name for path in tmp_path.iterdir()} == {"dataset", "criteo.tsv"}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    with pytest.raises(DataError, match="no dataset"):
        prepare_criteo(criteo_file, tmp_path / "full", overwrite=True)


def test_a_disk_that_refuses_is_a_storage_error(criteo_file, tmp_path):
    """A file size limit makes the kernel refuse writes as a full disk does."""
    limited = (
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from pibroch.errors import StorageError\ntry:\n"
        + "\n".join("    " + line for line in RUN.strip().splitlines())
        + "\nexcept StorageError as error:\n    print('refused', error)\n"
    )
    command = [
        sys.executable,
        "-c",
        limited,
        str(criteo_file),
        str(tmp_path / "out"),
        "1000000",
        "4000000",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"NUMBA_CACHE_DIR": ""},
    )
    assert "refused got" in done.stdout, done.stderr[-2000:]
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_a_storage_error(prepare_criteo, criteo_file, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="need a writable folder"):
        prepare_criteo(criteo_file, tmp_path / "file" / "out")


def test_csv_with_quotes_bags_and_other_columns(tmp_path):
    rows = [
        ("a,b", "x|y", "1", "q"),
        ('c"d', "", "0", "q"),
        ("a,b", "y", "1", ""),
        ("e\nf", "x|x|z", "0", "q"),
    ] * 5
    quoted = [",".join('"' + field.replace('"', '""') + '"' for field in row) for row in rows]
    (tmp_path / "data.csv").write_text("\n".join(["user,tags,click,unused", *quoted]))
    schema = Schema.from_toml(
        'label = "click"\n[categorical.user]\nmin_count = 1\n[categorical.tags]\nmin_count ='
        " 1\nmulti_hot = true\n"
    )
    options = PrepareOptions(SplitRule.parse("none"), piece_bytes=100)
    prepare([TextSource(tmp_path / "data.csv", ",", True)], schema, tmp_path / "csv", options)
    split = EncodedDataset.open(tmp_path / "csv").split("train")
    assert split.ids[:4, 0].tolist()[0] == split.ids[2, 0] == 2
    assert len(set(split.ids[:, 0].tolist())) == 3
    assert split.dense.shape == (20, 0)
    assert np.diff(split.bags["tags"].offsets).tolist() == [2, 0, 1, 3] * 5
    x, y, x_again, x_third, z = split.bags["tags"].values[[0, 1, 3, 4, 5]].tolist()
    assert x == x_again == x_third == 2
    assert len({x, y, z}) == 3
    assert split.bags["tags"].values[2] == y


def test_parquet_gives_what_the_same_csv_gives(tmp_path):
    frame = pl.DataFrame(
        {
            "y": [1, 0] * 50,
            "n": [0.5, None] * 50,
            "c": ["a", 'b"', None, "d,e"] * 25,
            "l": [["p", "q"], []] * 50,
        }
    )
    frame.write_parquet(tmp_path / "data.parquet", row_group_size=13)
    frame.with_columns(pl.col("l").list.join("|")).write_csv(tmp_path / "data.csv")
    schema = Schema.from_toml(
        'label = "y"\n[dense.n]\n[categorical.c]\n[categorical.l]\nmulti_hot = true\n'
    )
    prepare(
        [ParquetSource(tmp_path / "data.parquet", schema)],
        schema,
        tmp_path / "p",
        PrepareOptions(piece_bytes=256 * 7),
    )
    prepare(
        [TextSource(tmp_path / "data.csv", ",", True)],
        schema,
        tmp_path / "c",
        PrepareOptions(piece_bytes=200),
    )
    assert contents(tmp_path / "p", LINES) == contents(tmp_path / "c", LINES)
    assert EncodedDataset.open(tmp_path / "p").samples["train"] == 70


def test_full_avazu_uses_the_hour_of_day(tmp_path):
    lines = ["id,click,hour,site"] + [
        f"{i},{i % 2},141021{i % 24:02d},s{i % 3}" for i in range(480)
    ]
    lines += [f"{i},{i % 2},141030{i % 24:02d},s{i % 3}" for i in range(480)]
    (tmp_path / "avazu.csv").write_text("\n".join(lines))
    source = TextSource(tmp_path / "avazu.csv", ",", True)
    header, first = source.first_records(2)
    prepare([source], avazu_schema(header, first), tmp_path / "out", PrepareOptions())
    dataset = EncodedDataset.open(tmp_path / "out")
    assert dataset.num_rows == {"hour": 26, "site": 5}
    assert dataset.split("train").dense.shape == (672, 0)


def test_serving_encodes_as_preparation_did(prepare_criteo, criteo_file, criteo_lines, tmp_path):
    prepare_criteo(criteo_file)
    dataset = EncodedDataset.open(tmp_path / "dataset")
    records = [line.split("\t") for line in criteo_lines[1700:]]
    columns = {
        name: [r[i] or None for r in records] for i, name in enumerate(dataset.schema.columns)
    }
    batch = batch_from_raw(dataset.schema, dataset.encoders, columns)
    batch.validate()
    test = dataset.split("test")
    np.testing.assert_array_equal(batch.values.numpy().reshape(39, -1).T, test.ids)
    np.testing.assert_array_equal(batch.dense.numpy(), test.dense)
    np.testing.assert_array_equal(batch.labels.numpy(), test.labels)
    numbers = columns | {
        f"I{i}": [None if v is None else int(v) for v in columns[f"I{i}"]] for i in range(1, 14)
    }
    np.testing.assert_array_equal(
        batch_from_raw(dataset.schema, dataset.encoders, numbers).dense, batch.dense
    )
    gaps = [
        batch_from_raw(dataset.schema, dataset.encoders, columns | {"I1": [gap] * 300})
        for gap in (None, math.nan)
    ]
    np.testing.assert_array_equal(gaps[0].dense, gaps[1].dense)
    with pytest.raises(DataError, match="`inf` as I1 of sample 0"):
        batch_from_raw(dataset.schema, dataset.encoders, columns | {"I1": [math.inf] * 300})
    with pytest.raises(DataError, match="no column `C26`"):
        batch_from_raw(
            dataset.schema, dataset.encoders, {k: v for k, v in columns.items() if k != "C26"}
        )


def test_memory_does_not_grow_with_the_input(tmp_path):
    """Peak memory for 8 times the text, all ids distinct, with the same memory to count in."""
    peaks = []
    for megabytes in (4, 28):
        path = tmp_path / f"{megabytes}.tsv"
        generator = random.Random(megabytes)
        with path.open("w") as file:
            while file.tell() < megabytes << 20:
                ids = "\t".join(f"{generator.getrandbits(32):08x}" for _ in range(26))
                file.write(f"0\t{'1	' * 13}{ids}\n")
        out = tmp_path / f"out{megabytes}"
        code = (
            RUN + "\nimport resource\nprint('peak',"
            " resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        )
        command = [sys.executable, "-c", code, str(path), str(out), str(1 << 20), "20000"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        peaks.append(int(done.stdout.split()[-1]) * 1024)
    assert peaks[1] - peaks[0] < 8 << 20, (
        f"{(peaks[1] - peaks[0]) >> 20} MB more for 24 MB more text"
    )


def test_the_real_sample_is_prepared_in_time(real_data, tmp_path):
    path = real_data("criteo_kaggle_137k.tsv.gz")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path / "out"), str(32 << 20), "4000000"],
        check=True,
        capture_output=True,
        timeout=240,
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime - before.ru_utime < 20, "seconds of one core, however busy it is otherwise"
    assert EncodedDataset.open(tmp_path / "out").samples == {
        "train": 95_997,
        "validation": 20_571,
        "test": 20_571,
    }
