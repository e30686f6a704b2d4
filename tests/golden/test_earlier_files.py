"""Files that version 0.1 wrote are read as they were.

Their ``[model]`` has all models' settings.
"""

from pathlib import Path

import pytest
import torch

import pibroch as pb
from pibroch.config import ModelConfig, load_recipe
from pibroch.config.model import DCNv2Config, DeepFMConfig
from pibroch.models import DLRM, build_model

EARLIER = Path(__file__).parent / "earlier"


def test_a_configuration():
    assert "cross_layers = 2" in (EARLIER / "config.toml").read_text()
    config = load_recipe(str(EARLIER / "config.toml"))
    assert (
        config.model == DeepFMConfig(dim=2, top=(2,), dropout=0.2, batch_norm=True)
        and config.loss.name == "bce"
    )
    as_before = load_recipe(str(EARLIER / "config.toml"), ["model.name=dcnv2"])
    assert as_before.model.cross_layers == 2, "one recipe serves all models"


def test_an_export_gives_the_logits_that_it_gave():
    predictor = pb.Predictor.open(EARLIER / "export")
    batch = pb.JaggedBatch.from_one_hot(
        torch.linspace(0, 1, 26).view(2, 13),
        list(predictor.features),
        torch.tensor([[1, 0]] * 26),
        torch.zeros(2),
    )
    expected = torch.tensor([0.1026446670293808, -0.2941657304763794])
    torch.testing.assert_close(predictor.logits(batch), expected)


def test_a_delta_of_the_first_layout_gives_the_logits_that_it_gave():
    predictor = pb.Predictor.open(EARLIER / "deltas" / "2")
    batch = pb.JaggedBatch.from_one_hot(
        torch.linspace(0, 1, 26).view(2, 13),
        list(predictor.features),
        torch.tensor([[2, 0]] * 26),
        torch.zeros(2),
    )
    expected = torch.tensor([-0.30430012941360474, -0.45265597105026245])
    torch.testing.assert_close(predictor.logits(batch), expected)
    assert predictor.step == 4 and predictor.version == "4-f46d3459-int8"


def test_programs():
    """``ModelConfig`` is the section of whichever model it names."""
    raw = {"name": "dcnv2", "cross_layers": 2, "towers": {"count": 3}}
    assert ModelConfig(**raw) == ModelConfig.model_validate(raw) == DCNv2Config(cross_layers=2)
    model = DLRM(4, 5, ModelConfig(dim=8, bottom=(16,), top=(16,)))
    assert model.config == build_model("dlrm", 4, 5, dim=8, bottom=(16,), top=(16,)).config
    with pytest.raises(pb.errors.ConfigError, match=r"DCNv2Config.*DLRM.*need a DLRMConfig"):
        DLRM(4, 5, DCNv2Config())
