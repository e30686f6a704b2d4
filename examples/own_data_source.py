"""A data source of one's own: click logs as JSON lines. See docs/extending/data-source.md.

python examples/own_data_source.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pibroch as pb
from pibroch.data import CategoricalFeature, DenseFeature, EncodedDataset, Loader, Schema
from pibroch.data.layout import Layout
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.sources import Place, TextPiece
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError


class JsonLines:
    """A file with an object a line; what its columns lack is missing."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.path = path
        self.columns = columns
        self.layout = Layout("\t", quotes=False)
        self._size = path.stat().st_size

    def pieces(self, start: Place, piece_bytes: int) -> Iterator[TextPiece]:
        """Whole lines as text between tabs, from a place between two of them on."""
        with self.path.open("rb") as file:
            file.seek(start.offset)
            while lines := file.readlines(piece_bytes):
                end = Place(start.offset + sum(map(len, lines)), start.line + len(lines))
                text = b"".join(
                    self._text(line, start.line + number)
                    for number, line in enumerate(lines, start=1)
                )
                yield TextPiece(text, start, end, end.offset / self._size)
                start = end

    def _text(self, line: bytes, number: int) -> bytes:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{self.path}, line {number}: {error}", "an object in JSON", "look at that line"
            ) from error
        fields = ("" if record.get(name) is None else str(record[name]) for name in self.columns)
        return (
            "\t".join(field.replace("\t", " ").replace("\n", " ") for field in fields) + "\n"
        ).encode()


SCHEMA = Schema(
    label="clicked",
    dense=(DenseFeature(name="price", column="price"),),
    categorical=(
        CategoricalFeature(name="shop", column="shop"),
        CategoricalFeature(name="item", column="item"),
    ),
)


def write_log(path: Path, num_lines: int) -> None:
    """A log as somebody else might have written it."""
    random.seed(0)
    with path.open("w") as file:
        for _ in range(num_lines):
            shop = random.randrange(5)
            item = random.randrange(200)
            clicked = int(random.random() < (0.6 if (shop + item) % 4 == 0 else 0.1))
            record = {
                "clicked": clicked,
                "shop": f"s{shop}",
                "item": f"i{item}",
                "price": random.random() * 10,
            }
            file.write(json.dumps(record) + "\n")


def main(folder: Path) -> None:
    """Prepare such a log, and look at batches of it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "clicks.jsonl"
    write_log(log, 5000)
    source = JsonLines(log, ("clicked", "price", "shop", "item"))
    options = PrepareOptions(SplitRule.parse("time:0.8/0.1/0.1", seed=0), overwrite=True)
    prepare([source], SCHEMA, folder / "encoded", options)
    dataset = EncodedDataset.open(folder / "encoded")
    batch = next(iter(Loader(dataset.split("train"), batch_size=256, shuffle=True)))
    assert isinstance(batch, pb.JaggedBatch)
    print(
        f"{len(dataset.split('train'))} samples to train on; a batch of {batch.batch_size} has"
        f" {', '.join(batch.keys)}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/own"))
