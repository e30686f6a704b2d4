"""All models: shapes, formulas against a direct transcription, options, determinism."""

from typing import Any

import pytest
import torch
from torch import nn

from pibroch.config.model import ModelConfig
from pibroch.errors import ConfigError, DataError
from pibroch.models import DLRM, MODELS, CrossNet, DCNv2, DeepFM, Model, WideAndDeep, build_model

NAMES = sorted(name for name, model in MODELS.items() if model.pools)
"""Others: test_sequences.py."""


def random_batch(model: Model, batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    width = model.table_dim(model.config.dim)
    return torch.randn(batch, model.num_dense), torch.randn(
        batch, model.num_features, width, requires_grad=True
    )


def small(name: str, num_dense: int = 4, **options: Any) -> Model:
    torch.manual_seed(1)
    return build_model(name, num_dense, 5, **{"dim": 3, "bottom": (8,), "top": (9, 7), **options})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_dense", [0, 4])
@pytest.mark.parametrize("batch", [0, 1, 6])
def test_one_logit_a_sample_and_a_gradient_for_all(name: str, num_dense: int, batch: int) -> None:
    model = small(name, num_dense)
    dense, embedded = random_batch(model, batch)
    logits = model(dense, embedded)
    assert logits.shape == (batch,)
    logits.square().sum().backward()
    assert embedded.grad is not None
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert batch == 0 or parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_norm": True},
        {"dropout": 0.5},
        {"embedding_dropout": 0.5},
        {"top": ()},
        {"bottom": ()},
        {"cross_rank": 2},
        {"structure": "stacked"},
        {"activation": "silu"},
        {"batch_norm": True, "dropout": 0.1, "num_dense": 0},
    ],
)
@pytest.mark.parametrize("batch", [0, 6])
def test_options(name: str, options: dict[str, object], batch: int) -> None:
    model = small(name, **options)  # type: ignore[arg-type]
    dense, embedded = random_batch(model, batch)
    for bf16 in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(dense, embedded)
        assert logits.shape == (batch,)
        assert logits.isfinite().all()
        logits.float().sum().backward()
        assert embedded.grad is not None
        assert embedded.grad.isfinite().all()


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_batch_norm_lets_the_ragged_last_batch_pass(batch: int) -> None:
    model = small("dlrm", batch_norm=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    dense, embedded = random_batch(model, batch)
    model(dense, embedded).sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.isfinite().all()
    changed = [
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    ]
    assert any("running_mean" in key for key in changed) == (batch > 1)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_acts_in_training_alone(name: str) -> None:
    model = small(name, embedding_dropout=0.5)
    batch = random_batch(model)
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_may_come_when_they_are_asked_for(name: str) -> None:
    """Embeddings are asked for once.

    DLRM does so after its bottom network, so that their gradient is there before that network's.
    """
    model = small(name)
    events = []
    dense, embedded = random_batch(model)

    def embeddings() -> torch.Tensor:
        events.append("embeddings")
        return embedded

    networks = [
        getattr(model, part)
        for part in ("bottom", "top", "deep", "cross", "linear")
        if hasattr(model, part)
    ]
    for network in networks:
        network.register_forward_hook(lambda *_: events.append("network"))
    logits = model(dense, embeddings)
    assert torch.equal(logits, model(dense, embedded))
    assert events.count("embeddings") == 1
    first = {"dlrm": 1, "dcnv2": 0, "deepfm": 1, "wide_deep": 1, "tower_dlrm": 1, "tower_dcn": 1}
    assert events.index("embeddings") == first.get(name, 0)


def test_rows_get_their_gradient_before_the_bottom_network() -> None:
    model = small("dlrm")
    order = []
    dense, embedded = random_batch(model)
    assert isinstance(model, DLRM)
    assert model.bottom is not None

    def embeddings() -> torch.Tensor:
        vectors = embedded * 1
        vectors.register_hook(lambda gradient: order.append("rows"))
        return vectors

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: order.append(name.split(".")[0])
        )
    model(dense, embeddings).sum().backward()
    assert order == ["top"] * 6 + ["rows"] + ["bottom"] * 4


@pytest.mark.parametrize("name", NAMES)
def test_seed_decides_the_numbers(name: str) -> None:
    first = small(name)
    second = small(name)
    batch = random_batch(first)
    assert torch.equal(first(*batch), second(*batch))


@pytest.mark.parametrize("name", NAMES)
def test_autocast_to_bfloat16(name: str) -> None:
    model = small(name)
    dense, embedded = random_batch(model)
    want = model(dense, embedded)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(dense, embedded)
    torch.testing.assert_close(logits.float(), want, rtol=0.1, atol=0.1)
    logits.float().sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_learns_a_pair(name: str) -> None:
    """The label is the sign of a product of two embeddings' parts: no linear model can fit it."""
    model = small(name, dim=4, top=(32,))
    dense, embedded = random_batch(model, 512)
    embedded = embedded.detach()
    labels = (embedded[:, 0, 0] * embedded[:, 1, 0] > 0).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, embedded), labels)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.45


def test_dlrm_formula() -> None:
    model = small("dlrm")
    assert isinstance(model, DLRM)
    dense, embedded = random_batch(model)
    assert model.bottom is not None
    bottom = model.bottom(dense)
    vectors = torch.cat([bottom[:, None], embedded], 1)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(6) for j in range(i)]
    want = model.top(torch.cat([bottom, torch.stack(pairs, 1)], 1)).squeeze(1)
    torch.testing.assert_close(model(dense, embedded), want)
    assert (bottom >= 0).all()


def test_cross_formula():
    torch.manual_seed(0)
    full = CrossNet(6, 2)
    low = CrossNet(6, 2, rank=3)
    x0 = torch.randn(4, 6)
    for net in (full, low):
        x = x0
        for i, cross in enumerate(net.cross):
            weight = cross.weight @ net.reduce[i].weight if net is low else cross.weight
            x = x0 * (x @ weight.T + cross.bias) + x
        torch.testing.assert_close(net(x0), x)


def test_dcnv2_structures_differ() -> None:
    parallel = small("dcnv2")
    stacked = small("dcnv2", structure="stacked")
    assert isinstance(parallel, DCNv2)
    assert isinstance(stacked, DCNv2)
    assert parallel.head.in_features == 7 + 5 * 3 + 4
    assert stacked.head.in_features == 7


def test_deepfm_is_wide_deep_plus_pairs() -> None:
    wide = small("wide_deep")
    deep_fm = small("deepfm")
    dense, embedded = random_batch(wide)
    vectors = embedded[..., :3]
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i))
    torch.testing.assert_close(deep_fm(dense, embedded), wide(dense, embedded) + pairs)


def test_first_order_weight_is_the_last_column() -> None:
    model = small("wide_deep")
    dense, embedded = random_batch(model)
    more = embedded.detach().clone()
    more[:, :, -1] += 1
    torch.testing.assert_close(model(dense, more), model(dense, embedded) + 5)


def test_table_width() -> None:
    assert [m.table_dim(16) for m in (DLRM, DCNv2, DeepFM, WideAndDeep)] == [16, 16, 17, 17]


def test_state_goes_through_a_dictionary() -> None:
    first = small("dlrm")
    second = build_model("dlrm", 4, 5, dim=3, bottom=(8,), top=(9, 7))
    second.load_state_dict(first.state_dict())
    batch = random_batch(first)
    assert torch.equal(first(*batch), second(*batch))
    assert "top.layers.0.weight" in first.state_dict()


@pytest.mark.parametrize(
    ("dense_shape", "embedded_shape"),
    [
        ((6, 4), (6, 5, 2)),
        ((6, 4), (6, 4, 3)),
        ((6, 3), (6, 5, 3)),
        ((5, 4), (6, 5, 3)),
        ((6, 4), (6, 15)),
    ],
)
def test_wrong_shapes_are_named(
    dense_shape: tuple[int, ...], embedded_shape: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match=r"got .* need \["):
        small("dlrm")(torch.randn(dense_shape), torch.randn(embedded_shape))


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 0},
        {"top": (0,)},
        {"widths": (3,)},
        {"dropout": 1.0},
        {"structure": "both"},
        {"cross_rank": 0},
        {"heads": 0},
        {"contexts": "site"},
    ],
)
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        build_model("dlrm", 4, 5, **options)


def test_unknown_model_is_named() -> None:
    with pytest.raises(ConfigError, match="'dlrm3'"):
        build_model("dlrm3", 4, 5)


def test_configuration_and_options_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="dim"):
        build_model(ModelConfig(), 4, 5, dim=3)
    with pytest.raises(ConfigError, match="categorical"):
        build_model(ModelConfig(), 4, 0)
