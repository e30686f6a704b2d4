"""Models of sequences against their equations in NumPy, float64, and their gradients.

Shape legend: B samples, n dense features, F features that are no sequence, D embedding width, T
positions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from pibroch.config import model_sequences
from pibroch.errors import ConfigError, DataError
from pibroch.exchange.output import JaggedEmbeddings
from pibroch.models import SequenceModel, build_model, set_place

Array = np.ndarray
Weights = Mapping[str, Array]
DIM, LENGTH = 4, 3
FEATURES = ("user", "item", "seen", "place", "bought")
HISTORIES = {"seen": "item", "bought": "place"}
LENGTHS = {"user": [1] * 6, "item": [1] * 6, "place": [0, 2, 1, 1, 3, 1]}
LENGTHS |= {"seen": [2, 0, 3, 5, 1, 4], "bought": [0, 0, 1, 2, 4, 3]}
NAMES = [spec.name for spec in model_sequences.SPECS]


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def affine(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def network(weights: Weights, name: str, x: Array, num_hidden: int) -> Array:
    for i in range(num_hidden):
        x = relu(affine(weights, f"{name}.layers.{i}", x))
    return affine(weights, f"{name}.layers.{num_hidden}", x)


def norm(weights: Weights, name: str, x: Array) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    normalised = (x - mean) / np.sqrt(variance + 1e-5)
    return normalised * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def attention(weights: Weights, name: str, x: Array, heads: int, is_causal: bool) -> Array:
    """Of the items of one sample, ``[t, D]``."""
    queries, keys, values = np.split(affine(weights, f"{name}.project", x), 3, axis=1)
    parts = []
    for q, k, v in zip(*(np.split(a, heads, axis=1) for a in (queries, keys, values)), strict=True):
        read = np.zeros_like(v)
        for t in range(len(x)):
            last = t + 1 if is_causal else len(x)
            read[t] = softmax(k[:last] @ q[t] / np.sqrt(q.shape[1])) @ v[:last]
        parts.append(read)
    return affine(weights, f"{name}.join", np.hstack(parts))


def last_items(vectors: list[Array]) -> list[Array]:
    return [each[-LENGTH:] for each in vectors]


def others(embedded: Mapping[str, list[Array]], sample: int, names: list[str]) -> list[Array]:
    return [embedded[name][sample].sum(0) for name in names]


Equation = Callable[[Weights, Array, Mapping[str, list[Array]]], Array]


def din(is_softmax: bool) -> Equation:
    def equation(weights: Weights, dense: Array, embedded: Mapping[str, list[Array]]) -> Array:
        logits = []
        for b, numbers in enumerate(dense):
            inputs = others(embedded, b, ["user", "item", "place"])
            for number, (name, target) in enumerate(HISTORIES.items()):
                q = embedded[target][b].sum(0)
                items = last_items(embedded[name])[b]
                pairs = [np.hstack([q, h, q - h, q * h]) for h in items]
                scores = [network(weights, f"attention.{number}.unit", pair, 1) for pair in pairs]
                if is_softmax and scores:
                    scores = list(softmax(np.array(scores)))
                inputs.append(sum((a * h for a, h in zip(scores, items, strict=True)), 0 * q))
            targets = [embedded[target][b].sum(0) for target in HISTORIES.values()]
            inputs += [u * q for u, q in zip(inputs[-2:], targets, strict=True)]
            logits.append(network(weights, "deep", np.hstack([*inputs, numbers]), 2))
        return np.array(logits)

    return equation


def bst(heads: int) -> Equation:
    def equation(weights: Weights, dense: Array, embedded: Mapping[str, list[Array]]) -> Array:
        logits = []
        for b, numbers in enumerate(dense):
            inputs = others(embedded, b, ["user", "item", "place"])
            for number, (name, target) in enumerate(HISTORIES.items()):
                place = f"encoders.{number}"
                x = np.vstack([last_items(embedded[name])[b], embedded[target][b].sum(0)])
                x = x + weights[f"{place}.positions"][-len(x) :]
                for i in range(2):
                    block = f"{place}.blocks.{i}"
                    read = attention(weights, f"{block}.attention", x, heads, is_causal=False)
                    x = norm(weights, f"{block}.norms.0", x + read)
                    x = norm(
                        weights, f"{block}.norms.1", x + network(weights, f"{block}.network", x, 1)
                    )
                inputs += [np.zeros((LENGTH + 1 - len(x)) * DIM), x.reshape(-1)]
            logits.append(network(weights, "deep", np.hstack([*inputs, numbers]), 2))
        return np.array(logits)

    return equation


def sasrec(weights: Weights, dense: Array, embedded: Mapping[str, list[Array]]) -> Array:
    logits = np.zeros(len(dense))
    for b, items in enumerate(last_items(embedded["seen"])):
        if not len(items):
            continue
        x = items + weights["positions"][-len(items) :]
        for i in range(2):
            block = f"blocks.{i}"
            normed = norm(weights, f"{block}.norms.0", x)
            x = x + attention(weights, f"{block}.attention", normed, 2, is_causal=True)
            x = x + network(weights, f"{block}.network", norm(weights, f"{block}.norms.1", x), 1)
        logits[b] = norm(weights, "norm", x[-1]) @ embedded["item"][b].sum(0)
    return logits


ONE = {"histories": {"seen": "item"}}
CASES: list[tuple[str, dict[str, Any], Equation]] = [
    ("din", {"attention_hidden": (5,)}, din(is_softmax=False)),
    ("din", {"attention_hidden": (5,), "attention_softmax": True}, din(is_softmax=True)),
    ("bst", {"blocks": 2}, bst(1)),
    ("bst", {"blocks": 2, "attention_heads": 2}, bst(2)),
    ("sasrec", {"attention_heads": 2, **ONE}, sasrec),
]


def built(name: str, num_dense: int = 2, **options: Any) -> SequenceModel:
    torch.manual_seed(2)
    small: dict[str, Any] = {"dim": DIM, "top": (6, 4), "max_length": LENGTH}
    small |= ONE if name == "sasrec" else {"histories": HISTORIES}
    model = build_model(name, num_dense, 5, FEATURES, **small | options)
    assert isinstance(model, SequenceModel)
    return model


def double(name: str, options: Mapping[str, Any], num_dense: int = 2) -> SequenceModel:
    """In float64, as it serves; no weight is 0 or 1."""
    model = built(name, num_dense, **options).double().eval()
    for tensor in model.state_dict().values():
        tensor.add_(torch.rand(tensor.shape, dtype=tensor.dtype) * 0.2)
    return model


def offsets_of(name: str, first: int = 0, after: int = 6) -> torch.Tensor:
    return torch.tensor([0, *LENGTHS[name][first:after]]).cumsum(0)


def random_vectors(dtype: torch.dtype = torch.float64, size: int = 6) -> list[torch.Tensor]:
    """Of each feature, ``[V, D]``."""
    torch.manual_seed(5)
    counts = [sum(LENGTHS[name][:size]) for name in FEATURES]
    return [torch.randn(count, DIM, dtype=dtype, requires_grad=True) for count in counts]


def by_feature(vectors: list[torch.Tensor], size: int = 6) -> dict[str, JaggedEmbeddings]:
    return {
        name: JaggedEmbeddings(each, offsets_of(name, 0, size))
        for name, each in zip(FEATURES, vectors, strict=True)
    }


@pytest.mark.parametrize(("name", "options", "equation"), CASES)
@pytest.mark.parametrize("num_dense", [0, 2])
def test_logits_are_those_of_the_equations(
    name: str, options: dict[str, Any], equation: Equation, num_dense: int
) -> None:
    model = double(name, options, num_dense)
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    dense = torch.randn(6, num_dense, dtype=torch.float64)
    vectors = random_vectors()
    samples = {
        feature: np.split(each.detach().numpy(), np.cumsum(LENGTHS[feature])[:-1])
        for feature, each in zip(FEATURES, vectors, strict=True)
    }
    got = model(dense, by_feature(vectors)).detach().numpy()
    np.testing.assert_allclose(got, equation(weights, dense.numpy(), samples).reshape(-1), 1e-9)


@pytest.mark.parametrize(("name", "options", "equation"), CASES)
def test_gradients_are_those_of_differences(
    name: str, options: dict[str, Any], equation: Equation
) -> None:
    model = double(name, options)
    names, parameters = zip(*model.named_parameters(), strict=True)
    dense = torch.randn(3, 2, dtype=torch.float64)
    count = len(FEATURES)

    def logits(*tensors: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(names, tensors[count:], strict=True))
        inputs = dense, by_feature(list(tensors[:count]), 3)
        out: torch.Tensor = torch.func.functional_call(model, weights, inputs)
        return out

    inputs = (*random_vectors(size=3), *parameters)
    assert torch.autograd.gradcheck(logits, inputs, fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_norm": True},
        {"dropout": 0.5, "embedding_dropout": 0.5},
        {"top": ()},
        {"activation": "silu"},
        {"max_length": 1},
        {"max_length": 9, "attention_heads": 2},
    ],
)
@pytest.mark.parametrize("size", [0, 6])
def test_options(name: str, options: dict[str, Any], size: int) -> None:
    model = built(name, **options)
    for bf16 in (False, True):
        vectors = random_vectors(torch.float32, size)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(torch.randn(size, 2), lambda v=vectors: by_feature(v, size))
        assert logits.shape == (size,)
        logits.float().square().sum().backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
        assert all(each.grad is None or each.grad.isfinite().all() for each in vectors)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_has_its_logit_in_any_part_of_the_batch(name: str) -> None:
    model = built(name, dropout=0.3, embedding_dropout=0.2)
    dense = torch.randn(6, 2)
    vectors = by_feature(random_vectors(torch.float32))
    set_place(model, 1, 2, 0)
    whole = model(dense, vectors)
    parts = []
    for begin, end in ((0, 4), (4, 4), (4, 6)):
        set_place(model, 1, 2, begin)
        part = {
            feature: JaggedEmbeddings(
                each.values[each.offsets[begin] : each.offsets[end]],
                offsets_of(feature, begin, end),
            )
            for feature, each in vectors.items()
        }
        parts.append(model(dense[begin:end], part))
    torch.testing.assert_close(torch.cat(parts), whole)


def test_what_is_behind_the_last_items_is_not_read() -> None:
    vectors = random_vectors(torch.float32)
    embedded = by_feature(vectors)
    model = built("din").eval()
    before = model(torch.zeros(6, 2), embedded)
    first = int(embedded["seen"].offsets[3])
    with torch.no_grad():
        embedded["seen"].values[first : first + 2] += 1  # of five items; three are read
    assert torch.equal(model(torch.zeros(6, 2), embedded), before)
    with torch.no_grad():
        embedded["seen"].values[first + 2] += 1
    assert not torch.equal(model(torch.zeros(6, 2), embedded), before)


def test_what_cannot_be_a_history_is_named() -> None:
    def build(name: str = "din", **options: Any) -> None:
        build_model(name, 0, 5, FEATURES, dim=DIM, **options)

    with pytest.raises(ConfigError, match=r"no model\.histories for din"):
        build()
    with pytest.raises(ConfigError, match=r"sequence 'sen' in model\.histories; need one of user"):
        build(histories={"sen": "item"})
    with pytest.raises(ConfigError, match=r"item 'bought' in model\.histories"):
        build(histories=HISTORIES | {"seen": "bought"})
    with pytest.raises(ConfigError, match=r"2 sequences in model\.histories for sasrec"):
        build("sasrec", histories=HISTORIES)
    with pytest.raises(ConfigError, match="3 heads for embeddings of width 4"):
        build("bst", histories=HISTORIES, attention_heads=3)
    model = built("din")
    with pytest.raises(ConfigError, match="one tensor of embeddings for DIN"):
        model(torch.zeros(6, 2), torch.zeros(6, 5, DIM))
    with pytest.raises(DataError, match=r"dense features \[6, 3\]"):
        model(torch.zeros(6, 3), by_feature(random_vectors()))
