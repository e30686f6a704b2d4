import json

import pytest
import torch

from pibroch.config.model import ModelConfig
from pibroch.errors import ConfigError
from pibroch.models import DLRM, TowerDLRM, TowerModule, Towers, build_model, training_flops

PAPER = {"dim": 128, "bottom": (512, 256)}
DCN = {**PAPER, "top": (1024, 1024, 512, 256), "cross_layers": 3, "cross_rank": 512}


@pytest.mark.parametrize(("width", "mflops"), [(64, 8.95), (32, 7.93), (16, 7.42), (8, 7.16)])
def test_dlrm_on_towers_takes_the_papers_operations(width, mflops):
    """Tables 4 and 5 of DMT; the text's 7.41 at D = 16 is 7.419."""
    model = build_model(
        "tower_dlrm", 13, 26, **PAPER, top=(1024, 512, 256), towers={"count": 8, "width": width}
    )
    assert training_flops(model) / 1e6 == pytest.approx(mflops, rel=0.001)
    assert model.compression == 128 / width


def test_models_without_towers_take_the_papers_operations():
    dlrm = build_model("dlrm", 13, 26, **PAPER, top=(1024, 1024, 512, 256))
    assert training_flops(dlrm) / 1e6 == pytest.approx(14.74, rel=0.001)
    dcn = build_model("tower_dcn", 13, 26, **DCN, towers={"pass_through": True})
    assert training_flops(dcn) / 1e6 == pytest.approx(96.22, rel=0.001)


@pytest.mark.parametrize(("count", "mflops"), [(2, 43.71), (4, 50.01), (8, 62.60)])
def test_dcn_on_towers_takes_the_papers_operations(count, mflops):
    model = build_model("tower_dcn", 13, 26, **DCN, towers={"count": count, "rank": 512})
    assert training_flops(model) / 1e6 == pytest.approx(mflops, rel=0.001)


def test_pass_through_is_the_model_without_towers():
    options = {"dim": 8, "bottom": (6,), "top": (5,)}
    torch.manual_seed(0)
    plain = build_model("dlrm", 3, 4, **options)
    torch.manual_seed(0)
    tower = build_model(
        "tower_dlrm",
        3,
        4,
        **options,
        towers={"pass_through": True, "groups": [["0", "1"], ["2", "3"]]},
    )
    dense = torch.randn(7, 3)
    embedded = torch.randn(7, 4, 8)
    assert isinstance(plain, DLRM) and isinstance(tower, TowerDLRM)
    assert torch.equal(plain(dense, embedded), tower(dense, embedded))


@pytest.mark.parametrize("name", ["tower_dlrm", "tower_dcn"])
@pytest.mark.parametrize("groups", [None, [["c", "a"], ["d"], ["b", "e"]]])
def test_a_tower_sees_its_own_features_alone(name, groups):
    towers = {"count": 2, "width": 3, "combined": 1, "rank": 2, "groups": groups}
    model = build_model(name, 2, 5, tuple("abcde"), dim=4, bottom=(6,), top=(5,), towers=towers)
    numbers = (
        [["abcde".index(name) for name in group] for group in groups]
        if groups
        else [[0, 2, 4], [1, 3]]
    )
    embedded = torch.randn(3, 5, 4, requires_grad=True)
    out = model.towers(embedded)
    first = 0
    assert out.shape == (3, model.towers.num_outputs, 3)
    for tower, group in zip(model.towers.towers, numbers, strict=True):
        part = out[:, first : first + tower.num_outputs]
        first += tower.num_outputs
        assert torch.equal(part, tower(embedded[:, group]))
        (gradient,) = torch.autograd.grad(part.sum(), embedded, retain_graph=True)
        assert sorted(gradient.abs().sum((0, 2)).nonzero()[:, 0].tolist()) == sorted(group)


def test_a_module_of_ones_own():
    class Mean(TowerModule):
        num_outputs = 1

        def forward(self, embedded):
            return embedded.mean(1, keepdim=True)

    towers = Towers([[1, 2], [0]], lambda _: Mean())
    embedded = torch.randn(5, 3, 4)
    assert torch.equal(towers(embedded), torch.stack([embedded[:, 1:].mean(1), embedded[:, 0]], 1))


def test_groups_come_from_a_file(tmp_path):
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"towers": [["b"], ["a", "c"]]}))
    config = ModelConfig.model_validate({"name": "tower_dlrm", "towers": {"groups": str(path)}})
    assert config.towers.groups == (("b",), ("a", "c"))
    assert config.towers.numbers(("a", "b", "c")) == [[1], [0, 2]]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no file of groups"):
        ModelConfig.model_validate({"name": "tower_dlrm", "towers": {"groups": str(path)}})


@pytest.mark.parametrize(
    ("towers", "message"),
    [
        ({"count": 4}, "4 towers; need at most 3"),
        ({"groups": [["a"], ["b"]]}, "feature 'c' in no tower"),
        ({"groups": [["a", "b"], ["b", "c"]]}, "feature 'b' in two towers"),
        ({"groups": [["a", "b", "c"], ["d"]]}, "feature 'd' in a tower; need one of a, b, c"),
        ({"groups": [["a", "b", "c"], []]}, "a tower without features"),
        ({"combined": 0, "projected": 0}, "towers that give nothing"),
    ],
)
def test_towers_that_cannot_be(towers, message):
    with pytest.raises(ConfigError, match=message):
        build_model("tower_dlrm", 2, 3, ("a", "b", "c"), towers=towers)
