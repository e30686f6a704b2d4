"""Lines of a request have the fields of preparation, or are refused where it leaves them out."""

import pytest

from pibroch.data.dataset import EncodedDataset
from pibroch.data.lines import fields_of_lines
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource, split_record
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError

SCHEMA = Schema.from_toml(
    'label = "y"\n[categorical.a]\nmin_count = 1\n[categorical.b]\nmin_count = 1\n'
)
DIALECTS = {
    "end CR LF": b"y,a,b\r\n1,foo,x\r\n",
    "end CR CR LF": b"y,a,b\r\r\n1,foo,x\r\r\n0,q,z\r\r\n",
    "CR in a field": b"y,a,b\n1,fo\ro,x\n0,q,z\n",
    "no last end": b"y,a,b\n1,foo,x",
    "blank lines": b"y,a,b\n\n1,foo,x\n\r\n\n0,q,z\n\n",
    "byte order mark": b"\xef\xbb\xbfy,a,b\n1,foo,x\n",
    "doubled quotes": b'y,a,b\n1,"a ""b"" c",x\n',
    "separator and ends in quotes": b'y,a,b\n1,"a,\r\nb",x\n0,"q",z\n',
    "text after a quote": b'y,a,b\n1,"ab"cd,x\n0,"ab" ,z\n',
    "backslash": b'y,a,b\n1,"a\\"b",x\n',
    "quote inside": b'y,a,b\n1,5" pipe,x\n',
    "spaces": b"y,a,b\n1, foo ,x\n",
    "quoted header": b'"y","a","b"\n1,foo,x\n',
    "long": b"y,a,b\n1," + b"x" * 200_000 + b",x\n",
    "no UTF-8": b"y,a,b\n1,\xff\xfe,x\n0,\0,z\n",
    "other columns": b"u,b,y,v,a\n7,x,1,8,foo\n9,z,0,,\n",
}


def trained(folder, text, schema=SCHEMA):
    (folder / "t.csv").write_bytes(text)
    source = TextSource(folder / "t.csv", schema.separator, schema.quotes, schema.columns)
    options = PrepareOptions(SplitRule.parse("none"), overwrite=True)
    prepare([source], schema, folder / "set", options)
    dataset = EncodedDataset.open(folder / "set")
    return dataset, dataset.split("train").ids.T.reshape(-1).tolist()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_trained_is_served(tmp_path, dialect):
    text = DIALECTS[dialect]
    dataset, rows = trained(tmp_path, text)
    fields = fields_of_lines(text, SCHEMA, ["a", "b"], 10)
    assert batch_from_raw(SCHEMA, dataset.encoders, fields).values.tolist() == rows
    assert 0 not in rows


def test_the_label_may_be_left_out_of_some_lines(tmp_path):
    lines = b"b,y,a\nx,1,foo\nz,q\n,0,\n"
    assert fields_of_lines(lines, SCHEMA, ["a", "b"], 3) == {
        "a": [b"foo", b"q", b""],
        "b": [b"x", b"z", b""],
    }
    named = SCHEMA.model_copy(update={"columns": ("y", "a", "b"), "quotes": False})
    assert fields_of_lines(b'"foo,x\n', named, ["a", "b"], 3) == {"a": [b'"foo'], "b": [b"x"]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b'y,a,b\n1,"foo,x\n0,q,z\n', "row 0 that cannot be read.*never closed"),
        (b'y,a,b\n1,foo,x\n1,"foo,x\n0,q,"z"\n', "row 1 that cannot be read.*text follows"),
        (b'a,b\n"foo,x\nq",z\n', "row 0 that cannot be read.*records by themselves"),
        (b"y,a,b\n1,foo,x\n1,2,3,4\n", "4 fields in row 1; need 3, or one less without the label"),
        (b"y,a\n1,foo\n", "a header with 0 columns `b`; need a,b as the first line"),
        (b"y,a,b,b\n1,2,3,4\n", "a header with 2 columns `b`"),
        (b"a,b\n" + b"1,2\n" * 6, "more than 5 rows; need 1 to 5 in a request"),
    ],
)
def test_what_preparation_leaves_out_is_refused(lines, message):
    with pytest.raises(DataError, match=message):
        fields_of_lines(lines, SCHEMA, ["a", "b"], 5)


def test_a_blank_line_is_no_missing_value():
    schema = Schema.from_toml('label = "y"\n[categorical.a]\n')
    assert fields_of_lines(b"a\nfoo\nb\n", schema, ["a"], 5) == {"a": [b"foo", b"b"]}
    with pytest.raises(DataError, match=r"a blank line, which has no value.*null in JSON"):
        fields_of_lines(b"a\nfoo\n\nb\n", schema, ["a"], 5)


def test_a_header_is_split_as_records_are():
    assert split_record(b'a,"b,""c""",d\r\r\n', ",", True) == ["a", 'b,"c"', "d"]
    assert split_record(b'"a";b\n', ";", False) == ['"a"', "b"]
    assert split_record(b"", ",", True) == [""]
