import numpy as np
import pytest

from pibroch.data.parse import PieceParser
from pibroch.data.schema import Schema
from pibroch.data.transform import log_bin_rows, transform_dense
from pibroch.errors import DataError

SCHEMA = Schema.from_toml(
    'label = "y"\n[dense.price]\n[categorical.user]\n[categorical.age]\nbinning ='
    ' "log"\n[categorical.day]\nencoding = "integer"\nnum_buckets ='
    ' 7\n[categorical.tags]\nmulti_hot = true\n[categorical.hour]\ncolumn = "time"\ncharacters ='
    " [6, 8]\n"
)
COLUMNS = ("y", "user", "price", "extra", "age", "day", "tags", "time")


def parse(*lines: str):
    return PieceParser(SCHEMA, COLUMNS).parse("\n".join(lines).encode(), first_line=2)


def test_values_become_codes():
    piece = parse("1,u1,2.5,?,30,6,a|b,14102107", "0,u2,,?,,7,,14102207", "0,u1,-1,?,-5,,b,1410")
    assert piece.labels.tolist() == [1, 0, 0]
    np.testing.assert_array_equal(piece.dense[0], transform_dense(np.array([2.5, np.nan, -1])))
    user, age, day, tags, hour = piece.codes
    assert user.values[0] == user.values[2] != user.values[1]
    assert age.values.tolist() == log_bin_rows(np.array([30, np.nan, -5])).tolist()
    assert day.values.tolist() == [8, 0, 1]
    assert tags.lengths.tolist() == [2, 0, 1]
    assert tags.values[1] == tags.values[2]
    assert hour.values[0] == hour.values[1] != hour.values[2]
    assert piece.num_bad == 0


GOOD = "1,u,2,?,3,4,a,14102107"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,u,2", "3 columns instead of 8"),
        (GOOD + ",5", "9 columns instead of 8"),
        ("7,u,2,?,3,4,a,1", "`7` as y, a label must be 0 or 1"),
        (",u,2,?,3,4,a,1", "`` as y, a label must be 0 or 1"),
        ("yes,u,2,?,3,4,a,1", "`yes` as y"),
        ("1,u,abc,?,3,4,a,1", "`abc` as price, a finite number is needed"),
        ("1,u,nan,?,3,4,a,1", "`nan` as price"),
        ("1,u,-inf,?,3,4,a,1", "`-inf` as price"),
        ("1,u,2,?,x,4,a,1", "`x` as age"),
    ],
)
def test_malformed_records_are_left_out_with_their_reason(line, reason):
    piece = parse(GOOD, line, GOOD)
    assert piece.num_bad == 1
    assert piece.bad[0].line == 3
    assert reason in piece.bad[0].reason
    assert len(piece.labels) == len(piece.dense[0]) == 2
    assert all(len(codes.values) == 2 for codes in piece.codes)


@pytest.mark.parametrize("standard", ["", "mean = -2e19\nstd = 2\n"])
def test_numbers_whose_square_float32_does_not_hold_are_left_out(standard):
    schema = Schema.from_toml(
        f'label = "y"\n[dense.n]\ntransform = "identity"\n{standard}[dense.log]\ncolumn = "n"\n'
        '[categorical.u]\ncolumn = "n"\nencoding = "raw"\n'
    )
    largest = "1.6e19" if standard else "1.84e19"
    text = f"1,{largest}\n0,3e38\n0,\n0,-6e19\n0,-1\n"
    piece = PieceParser(schema, ("y", "n")).parse(text.encode())
    assert [each.line for each in piece.bad] == [2, 4]
    assert piece.bad[0].reason == "`3e38` as n, a finite number is needed, of at most 1.8e+19"
    assert len(piece.labels) == 3 and np.isfinite(np.square(piece.dense[0])).all()


def test_only_the_first_bad_records_are_kept():
    piece = parse(*["broken"] * 100, GOOD)
    assert piece.num_bad == 100
    assert [record.line for record in piece.bad] == [2, 3, 4, 5, 6]


def test_a_missing_column_is_named():
    with pytest.raises(DataError, match="need a column `tags`"):
        PieceParser(SCHEMA, tuple(column for column in COLUMNS if column != "tags"))


def test_a_column_twice_is_refused_where_it_is_read():
    with pytest.raises(DataError, match="need one column `user`, not 2"):
        PieceParser(SCHEMA, (*COLUMNS, "user"))
    PieceParser(SCHEMA, (*COLUMNS, "extra"))


@pytest.mark.parametrize(("separator", "named"), [("\t", r'"\\t"'), (";", '";"'), ("|", r'"\|"')])
def test_another_separator_is_guessed_from_the_header(separator, named):
    with pytest.raises(DataError, match=f"do: set `separator = {named}` in the schema"):
        PieceParser(SCHEMA, (separator.join(COLUMNS),))


def test_another_separator_is_guessed_from_a_record():
    assert parse(GOOD, GOOD.replace(",", ";")).bad[0].reason == (
        "1 columns instead of 8 (split at semicolons it has 8: is the separator right?)"
    )


def test_messages_hold_no_control_characters():
    piece = parse(GOOD, "1,u,\x1b[2J\r,?,3,4,a,1")
    assert piece.bad[0].reason == r"`\x1b[2J\r` as price, a finite number is needed"
    with pytest.raises(DataError, match=r"got the columns \\x00\\x1b, b; need"):
        PieceParser(SCHEMA, ("\0\x1b", "b"))
