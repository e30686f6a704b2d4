"""Raw text: find the fields of delimited lines, hash them, read numbers from them."""

from pibroch.kernels.text.numba import (
    EMPTY_CODE,
    NEWLINE,
    NOT_CLOSED,
    QUOTE,
    RECORD_ITEMS,
    RETURN,
    TEXT_AFTER_QUOTE,
    Bytes,
    Positions,
    complete_records_end,
    count_json,
    cut_characters,
    find_fields,
    hash_fields,
    parse_numbers,
    split_items,
)

__all__ = [
    "EMPTY_CODE",
    "NEWLINE",
    "NOT_CLOSED",
    "QUOTE",
    "RECORD_ITEMS",
    "RETURN",
    "TEXT_AFTER_QUOTE",
    "Bytes",
    "Positions",
    "complete_records_end",
    "count_json",
    "cut_characters",
    "find_fields",
    "hash_fields",
    "parse_numbers",
    "split_items",
]
