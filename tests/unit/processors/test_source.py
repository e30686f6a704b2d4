"""What a processor sends is the loader's batch, with all that belongs to its samples."""

from dataclasses import fields

import pytest
import torch

from pibroch.data import EncodedDataset, Loader
from pibroch.processors.source import from_plain, to_plain
from several_labels import SCHEMA, prepared

ONE = 'label = "click"\n[target.click]\nvalues = { no = 0, yes = 1 }\n[categorical.item]\n'


@pytest.mark.parametrize("schema", [SCHEMA, ONE])
def test_a_batch_comes_as_it_was(tmp_path, schema):
    split = EncodedDataset.open(prepared(tmp_path, schema)).split("train")
    batch = next(iter(Loader(split, 50, shuffle=True, part=(1, 2))))
    got = from_plain(to_plain(batch, is_one_hot=True), batch.keys)
    for field in fields(batch):
        before, after = (getattr(each, field.name) for each in (batch, got))
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after), field.name
        else:
            assert before == after, field.name
    assert (got.sample_weights is None) == (schema == ONE)
