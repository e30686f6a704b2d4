"""The plain models that TorchRec trains have pibroch's starting weights and logits."""

import pytest
import torch
from benchmarks.cases import Case
from benchmarks.workers.dlrm_pibroch import dense_model
from benchmarks.workers.plain_models import PLAIN_MODELS, plain_model

from pibroch.config import model_sequences, model_two_tower, model_zoo
from pibroch.models.build import MODELS


def test_every_model_without_towers_but_dlrm_and_the_zoo_has_a_plain_one():
    others = (*model_zoo.SPECS, *model_sequences.SPECS, *model_two_tower.SPECS)
    left_out = {"dlrm", "tower_dlrm", "tower_dcn", *(spec.name for spec in others)}
    assert set(PLAIN_MODELS) == set(MODELS) - left_out


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_a_plain_model_is_pibrochs(name):
    case = Case(
        "absent", MODELS[name].table_dim(7), batch_size=5, num_tables=3, num_dense=4, model=name
    )
    ours = dense_model(case)
    plain = plain_model(case)
    for actual, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, other)
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(5, 4, generator=generator)
    embedded = torch.randn(5, 3, case.dim, generator=generator)
    torch.testing.assert_close(plain(dense, embedded), ours(dense, embedded))
