"""Models of the zoo against their equations in NumPy, float64, and their gradients.

Shape legend: B samples, n dense features, F categorical ones, D embedding width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from pibroch.errors import ConfigError
from pibroch.models import MODELS, Model, build_model

Array = np.ndarray
Weights = Mapping[str, Array]
NORM = ("weight", "bias", "running_mean", "running_var")
Equation = Callable[[Weights, Array, Array], Array]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def affine(weights: Weights, name: str, x: Array) -> Array:
    bias = weights.get(f"{name}.bias", np.zeros(1))
    return np.einsum("oi,bi->bo", weights[f"{name}.weight"], x) + bias


def hidden(weights: Weights, name: str, x: Array, num_layers: int) -> Array:
    """Layers with ReLU, as :class:`pibroch.models.MLP` numbers them."""
    for i in range(num_layers):
        x = relu(affine(weights, f"{name}.layers.{i}", x))
    return x


def flat(dense: Array, embedded: Array) -> Array:
    return np.hstack([embedded.reshape(len(dense), -1), dense])


def gated_crosses(weights: Weights, c0: Array, num_layers: int) -> Array:
    c = c0
    for i in range(num_layers):
        products, gates = weights[f"cross.cross.{i}.weight"], weights[f"cross.gate.{i}.weight"]
        if f"cross.reduce.{i}.weight" in weights:
            products = products @ weights[f"cross.reduce.{i}.weight"]
            gates = gates @ weights[f"cross.gate_reduce.{i}.weight"]
        crossed = c @ products.T + weights[f"cross.cross.{i}.bias"]
        c = c0 * crossed * sigmoid(c @ gates.T) + c
    return c


def gdcn_parallel(weights: Weights, dense: Array, embedded: Array) -> Array:
    x = flat(dense, embedded)
    both = np.hstack([gated_crosses(weights, x, 2), hidden(weights, "deep", x, 2)])
    return affine(weights, "head", both)


def gdcn_stacked(weights: Weights, dense: Array, embedded: Array) -> Array:
    crossed = gated_crosses(weights, flat(dense, embedded), 2)
    return affine(weights, "head", hidden(weights, "deep", crossed, 2))


def finalmlp(contexts: tuple[list[int], list[int]] | None, num_heads: int = 1) -> Equation:
    """Streams with gates by these features, or without any gates."""

    def equation(weights: Weights, dense: Array, embedded: Array) -> Array:
        x = flat(dense, embedded)
        streams = []
        for stream in range(2):
            gated = x
            if contexts is not None:
                if contexts[stream]:
                    context = np.hstack([embedded[:, i] for i in contexts[stream]])
                else:
                    context = np.tile(weights[f"gates.{stream}.constant"], (len(x), 1))
                inner = hidden(weights, f"gates.{stream}.gate", context, 1)
                gated = x * 2 * sigmoid(affine(weights, f"gates.{stream}.gate.layers.1", inner))
            streams.append(hidden(weights, f"streams.{stream}", gated, 2))
        first, second = streams
        logits = affine(weights, "fusion.first", first) + affine(weights, "fusion.second", second)
        for sample in range(len(x)):
            parts = np.split(first[sample], num_heads), np.split(second[sample], num_heads)
            for product, left, right in zip(weights["fusion.products"], *parts, strict=True):
                logits[sample] += left @ product @ right
        return logits

    return equation


def fields(weights: Weights, dense: Array, embedded: Array) -> Array:
    """Embeddings and ``x_i v_i``."""
    if not dense.shape[1]:
        return embedded
    return np.concatenate([embedded, np.einsum("bn,nd->bnd", dense, weights["fields.of_dense"])], 1)


def factorized_block(weights: Weights, name: str, x: Array, is_sum: bool, norms: bool) -> Array:
    for i in range(2):
        first, second = np.split(affine(weights, f"{name}.layers.{i}.linear", x), 2, axis=1)
        x = first + first * second if is_sum else np.hstack([first, first * second])
        if norms:
            norm = {key: weights[f"{name}.norms.{i}.{key}"] for key in NORM}
            x = (x - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-5)
            x = x * norm["weight"] + norm["bias"]
    return affine(weights, f"{name}.layers.2", x)


def finalnet(num_blocks: int, gate: bool, is_sum: bool = False, norms: bool = False) -> Equation:
    def equation(weights: Weights, dense: Array, embedded: Array) -> Array:
        vectors = fields(weights, dense, embedded)
        behind = vectors
        if gate:
            gates = np.einsum("gf,bfd->bgd", weights["gate.gate.weight"], vectors)
            gates += weights["gate.gate.bias"][:, None]
            behind = np.concatenate([vectors, vectors * gates], 1)
        inputs = [behind.reshape(len(dense), -1), vectors.reshape(len(dense), -1)][:num_blocks]
        logits = [
            factorized_block(weights, f"blocks.{i}", x, is_sum, norms) for i, x in enumerate(inputs)
        ]
        return np.mean(logits, axis=0)

    return equation


def layer_norm(weights: Weights, name: str, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    normalised = (x - mean) / np.sqrt(variance + 1e-5)
    return normalised * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def mask_block(weights: Weights, name: str, embedded: Array, h: Array) -> Array:
    mask = affine(weights, f"{name}.mask.layers.1", hidden(weights, f"{name}.mask", embedded, 1))
    return relu(layer_norm(weights, f"{name}.norm", affine(weights, f"{name}.linear", mask * h)))


def masknet_serial(weights: Weights, dense: Array, embedded: Array) -> Array:
    vectors = fields(weights, dense, embedded)
    h = layer_norm(weights, "norm", vectors).reshape(len(dense), -1)
    for i in range(2):
        h = mask_block(weights, f"blocks.{i}", vectors.reshape(len(dense), -1), h)
    return affine(weights, "deep.layers.0", h)


def masknet_parallel(weights: Weights, dense: Array, embedded: Array) -> Array:
    vectors = fields(weights, dense, embedded)
    x = vectors.reshape(len(dense), -1)
    h = layer_norm(weights, "norm", vectors).reshape(len(dense), -1)
    blocks = np.hstack([mask_block(weights, f"blocks.{i}", x, h) for i in range(2)])
    return affine(weights, "deep.layers.2", hidden(weights, "deep", blocks, 2))


def qnn(num_rows: int, num_heads: int) -> Equation:
    def equation(weights: Weights, dense: Array, embedded: Array) -> Array:
        vectors = fields(weights, dense, embedded)
        num_samples, num_fields, _ = vectors.shape
        x = vectors.reshape(num_samples, -1)
        for i in range(2):
            parts = np.split(x.reshape(num_samples, num_fields, -1), num_heads, axis=2)
            name = f"layers.{i}.rows.layers.0"
            rows = relu(affine(weights, name, x)).reshape(num_samples, num_heads, num_rows, -1)
            products = [
                part.reshape(num_samples, -1) * rows[:, head, row]
                for head, part in enumerate(parts)
                for row in range(num_rows)
            ]
            by_head = [
                sum(products[head * num_rows : (head + 1) * num_rows]) for head in range(num_heads)
            ]
            x = np.hstack(by_head) + x
        return affine(weights, "head", x)

    return equation


def masked_crosses(weights: Weights, name: str, first: Array, is_exponential: bool) -> Array:
    x = first
    for i in range(2):
        c = affine(weights, f"{name}.cross.{i}.reduce", x)
        masked = c * relu(layer_norm(weights, f"{name}.cross.{i}.norm", c))
        factor = np.hstack([c, masked]) + weights[f"{name}.cross.{i}.bias"]
        x = (x if is_exponential else first) * factor + x
    return affine(weights, f"{name}.head", x)


def dcnv3(weights: Weights, dense: Array, embedded: Array) -> Array:
    vectors = fields(weights, dense, embedded)
    x = np.hstack([vectors[..., half].reshape(len(dense), -1) for half in np.s_[:2, 2:]])
    exponential = masked_crosses(weights, "exponential", x, is_exponential=True)
    return (exponential + masked_crosses(weights, "linear", x, is_exponential=False)) / 2


def softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def expert_outputs(weights: Weights, name: str, x: Array, count: int) -> list[Array]:
    return [hidden(weights, f"{name}.networks.{i}", x, 2) for i in range(count)]


def gated(weights: Weights, name: str, x: Array, outputs: list[Array]) -> Array:
    shares = softmax(x @ weights[f"{name}.linear.weight"].T)
    assert shares.shape[1] == len(outputs)
    return sum(shares[:, [i]] * each for i, each in enumerate(outputs))


def heads(weights: Weights, of_tasks: list[Array]) -> Array:
    logits = []
    for task, x in enumerate(of_tasks):
        name = f"heads.networks.{task}"
        logits.append(affine(weights, f"{name}.layers.2", hidden(weights, name, x, 2)))
    return np.hstack(logits)


def mmoe(num_tasks: int, num_experts: int) -> Equation:
    def equation(weights: Weights, dense: Array, embedded: Array) -> Array:
        x = flat(dense, embedded)
        outputs = expert_outputs(weights, "experts", x, num_experts)
        return heads(
            weights, [gated(weights, f"gates.{task}", x, outputs) for task in range(num_tasks)]
        )

    return equation


def ple(num_tasks: int, num_levels: int, num_own: int, num_shared: int) -> Equation:
    def equation(weights: Weights, dense: Array, embedded: Array) -> Array:
        of_tasks = [flat(dense, embedded)] * num_tasks
        common = of_tasks[0]
        for level in range(num_levels):
            name = f"levels.{level}"
            shared = expert_outputs(weights, f"{name}.shared", common, num_shared)
            own = [
                expert_outputs(weights, f"{name}.own.{task}", x, num_own)
                for task, x in enumerate(of_tasks)
            ]
            of_tasks = [
                gated(weights, f"{name}.gates.{task}", x, own[task] + shared)
                for task, x in enumerate(of_tasks)
            ]
            if level < num_levels - 1:
                everything = [each for outputs in own for each in outputs] + shared
                common = gated(weights, f"{name}.shared_gate", common, everything)
        return heads(weights, of_tasks)

    return equation


EXPERTS: dict[str, Any] = {"expert_hidden": (5, 3)}
CASES: list[tuple[str, dict[str, Any], Equation]] = [
    ("gdcn", {"cross_layers": 2}, gdcn_parallel),
    ("gdcn", {"cross_layers": 2, "cross_rank": 2}, gdcn_parallel),
    ("gdcn", {"cross_layers": 2, "structure": "stacked"}, gdcn_stacked),
    ("finalmlp", {"gate_hidden": (3,)}, finalmlp(([], []))),
    ("finalmlp", {"gate": False, "second_top": (5, 2), "heads": 2}, finalmlp(None, 2)),
    ("finalmlp", {"gate_hidden": (3,), "contexts": (("1", "0"), ())}, finalmlp(([1, 0], []))),
    ("finalnet", {}, finalnet(2, gate=True)),
    ("finalnet", {"blocks": 1, "field_gate": False}, finalnet(1, gate=False)),
    ("finalnet", {"residual": "sum"}, finalnet(2, gate=True, is_sum=True)),
    ("finalnet", {"batch_norm": True, "blocks": 1}, finalnet(1, gate=True, norms=True)),
    ("masknet", {"structure": "stacked", "mask_ratio": 0.5}, masknet_serial),
    ("masknet", {"mask_blocks": 2, "mask_width": 3, "mask_ratio": 0.5}, masknet_parallel),
    ("qnn", {"cross_layers": 2, "cross_rows": 3}, qnn(3, 1)),
    ("qnn", {"cross_layers": 2, "heads": 2}, qnn(2, 2)),
    ("dcnv3", {"cross_layers": 2}, dcnv3),
    ("mmoe", {**EXPERTS, "experts": 3}, mmoe(1, 3)),
    ("mmoe", {**EXPERTS, "experts": 2, "num_tasks": 2}, mmoe(2, 2)),
    ("ple", {**EXPERTS, "levels": 1}, ple(1, 1, 2, 2)),
    ("ple", {**EXPERTS, "num_tasks": 2, "shared_experts": 1}, ple(2, 2, 2, 1)),
]
"""A model, its options, and what it works out."""


def double(name: str, options: Mapping[str, Any], num_dense: int = 2) -> Model:
    """A model of 3 features of width 4 in float64, as it serves; no weight is 0 or 1."""
    torch.manual_seed(2)
    model = build_model(name, num_dense, 3, **{"dim": 4, "top": (6, 4), **options}).double().eval()
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.add_(torch.rand(tensor.shape, dtype=tensor.dtype) * 0.2)
            assert "running_var" not in key or (tensor > 0).all()
    return model


def random_input(model: Model, batch: int = 5) -> list[torch.Tensor]:
    shapes = (batch, model.num_dense), (batch, model.num_features, 4)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("name", "options", "equation"), CASES)
@pytest.mark.parametrize("num_dense", [0, 2])
def test_logits_are_those_of_the_equations(
    name: str, options: dict[str, Any], equation: Equation, num_dense: int
) -> None:
    model = double(name, options, num_dense)
    weights = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    inputs = random_input(model)
    want = equation(weights, *(tensor.detach().numpy() for tensor in inputs))
    logits = model(*inputs).detach().numpy()
    assert logits.shape == ((5,) if options.get("num_tasks", 1) == 1 else (5, 2))
    np.testing.assert_allclose(logits.reshape(-1), want.reshape(-1), rtol=1e-9)


@pytest.mark.parametrize(("name", "options", "equation"), CASES)
def test_gradients_are_those_of_differences(
    name: str, options: dict[str, Any], equation: Equation
) -> None:
    model = double(name, options)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def logits(*tensors: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(names, tensors[2:], strict=True))
        out: torch.Tensor = torch.func.functional_call(model, weights, tensors[:2])
        return out

    assert torch.autograd.gradcheck(logits, (*random_input(model, 2), *parameters))


def test_contexts_are_features_by_name() -> None:
    options: dict[str, Any] = {"dim": 4, "top": (6,), "contexts": (("b",), ("c", "a"))}
    model = build_model("finalmlp", 0, 3, tuple("abc"), **options)
    embedded = torch.randn(5, 3, 4)
    for stream, others in ((0, [0, 2]), (1, [1])):
        gate = model.get_submodule(f"gates.{stream}")
        ones = torch.ones(5, 12)
        changed = embedded.clone()
        changed[:, others] += 1
        assert torch.equal(gate(embedded, ones), gate(changed, ones))
        assert not torch.equal(gate(embedded, ones), gate(embedded + 1, ones))
    with pytest.raises(ConfigError, match=r"'d' in model\.contexts; need one of a, b, c"):
        build_model("finalmlp", 0, 3, tuple("abc"), **{**options, "contexts": (("d",), ())})
    with pytest.raises(ConfigError, match="4 heads for streams of widths 6 and 6"):
        build_model("finalmlp", 0, 3, **{**options, "contexts": ((), ()), "heads": 4})


def test_heads_divide_the_embeddings() -> None:
    with pytest.raises(ConfigError, match="3 heads for embeddings of width 4"):
        build_model("qnn", 0, 3, dim=4, heads=3)


def test_each_model_of_the_zoo_has_an_equation() -> None:
    elsewhere = {"dlrm", "dcnv2", "deepfm", "wide_deep", "tower_dlrm", "tower_dcn"}
    elsewhere.add("two_tower")  # see test_two_tower.py
    elsewhere |= {name for name, model in MODELS.items() if not model.pools}
    assert {name for name, *_ in CASES} == MODELS.keys() - elsewhere
