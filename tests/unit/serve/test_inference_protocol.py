"""Whatever is asked as an inference request: it is read, or refused in words.

Nothing else comes out.
"""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.serve.inference_protocol import parse_infer
from pibroch.serve.settings import Refusal

OUTPUTS = ("score", "logit")
EXAMPLES = int(os.environ.get("PIBROCH_SOAK_EXAMPLES", "150"))
SIZES = st.one_of(
    st.integers(0, 3), st.sampled_from([-1, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 63, 1 << 64])
)
NUMBERS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "255",
        "256",
        "1.5",
        "-0",
        "1e5",
        "1e39",
        "1e308",
        "1e999",
        "1e-400",
        "true",
        "null",
        '"a"',
        "{}",
        str(1 << 63),
        str(1 << 64),
        "9" * 5000,
        '"\\ud800"',
    ]
)
DATA = st.recursive(
    NUMBERS, lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
)
KINDS = st.sampled_from(["BOOL", "UINT8", "INT64", "UINT64", "FP16", "FP32", "FP64", "BYTES", "x"])


@st.composite
def requests(draw):
    """A body and the length of its JSON, as its header says it."""
    tensors = []
    blobs = []
    for number in range(draw(st.integers(0, 2))):
        shape = draw(st.lists(SIZES, max_size=9))
        text = f'{{"name":"a{number}","datatype":"{draw(KINDS)}","shape":{shape}'
        if draw(st.booleans()):
            blobs.append(draw(st.binary(max_size=16)))
            size = draw(st.one_of(st.just(str(len(blobs[-1]))), NUMBERS))
            text += f',"parameters":{{"binary_data_size":{size}}}'
        if not blobs or draw(st.booleans()):
            text += f',"data":{draw(DATA)}'
        tensors.append(text + "}")
    outputs = f'"outputs":[{{"name":"score","parameters":{{"binary_data":{draw(NUMBERS)}}}}}]'
    body = f'{{"inputs":[{",".join(tensors)}],{outputs}}}'.encode()
    length = draw(st.one_of(st.just(str(len(body))), st.none(), NUMBERS))
    return body + b"".join(blobs), length


@settings(max_examples=EXAMPLES, deadline=None)
@given(requests())
def test_a_request_is_read_or_refused(request):
    body, length = request
    try:
        response = parse_infer(body, length, OUTPUTS)
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 and refusal.reason
    else:
        for array in response.inputs.values():
            assert array.dtype.kind in "Obiuf" and array.size <= len(body)
            assert array.size or math.prod(size or 1 for size in array.shape) <= 1 << 20


@pytest.mark.parametrize(
    "shape",
    [[0, *[(1 << 31) - 1] * 3], [*[(1 << 31) - 1] * 3, 0], [0, 1 << 31], [(1 << 31) - 1, 0]],
)
@pytest.mark.parametrize("kind", ["INT64", "BYTES"])
@pytest.mark.parametrize("is_binary", [False, True])
def test_an_empty_tensor_of_a_shape_that_no_array_has(shape, kind, is_binary):
    values = {"parameters": {"binary_data_size": 0}} if is_binary else {"data": []}
    tensor = {"name": "ids", "datatype": kind, "shape": shape, **values}
    body = json.dumps({"inputs": [tensor]}).encode()
    with pytest.raises(Refusal, match="besides a 0 a product"):
        parse_infer(body, str(len(body)), OUTPUTS)
    tensor["shape"] = [0, 1 << 20]
    body = json.dumps({"inputs": [tensor]}).encode()
    assert parse_infer(body, str(len(body)), OUTPUTS).inputs["ids"].shape == (0, 1 << 20)


@pytest.mark.parametrize(("kind", "number"), [("FP16", 1e5), ("FP16", 1 << 70), ("FP32", 1e39)])
def test_a_number_that_its_type_has_not(kind, number):
    tensor = {"name": "dense", "datatype": kind, "shape": [1], "data": [number]}
    with pytest.raises(Refusal, match=f"no {kind} in `dense`"):
        parse_infer(json.dumps({"inputs": [tensor]}).encode(), None, OUTPUTS)
    tensor["data"] = [2]
    read = parse_infer(json.dumps({"inputs": [tensor]}).encode(), None, OUTPUTS)
    assert np.array_equal(read.inputs["dense"], [2])


TENSOR = {"name": "user", "shape": [1], "datatype": "BYTES", "data": ["u1"]}


def read(content):
    return parse_infer(json.dumps(content).encode(), None, OUTPUTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"outputs": None},
        {"parameters": None},
        {"parameters": {"binary_data_output": None}},
        {"inputs": [{**TENSOR, "parameters": None}]},
        {"inputs": [{**TENSOR, "parameters": {"binary_data_size": None}}]},
        {"outputs": [{"name": "score", "parameters": None}]},
        {"outputs": [{"name": "score", "parameters": {"binary_data": None}}]},
        {"outputs": [{"name": "score", "parameters": {"classification": 0}}]},
    ],
)
def test_what_is_optional_may_be_null(changes):
    plain = read({"inputs": [TENSOR]})
    request = read({"inputs": [TENSOR], **changes})
    assert request.inputs == plain.inputs and request.request_id is None
    assert request.outputs == plain.outputs == {"score": False}


def test_null_leaves_the_choice_of_the_whole_request():
    parameters = {"binary_data_output": True}
    output = {"name": "logit", "parameters": {"binary_data": None}}
    request = read({"inputs": [TENSOR], "parameters": parameters, "outputs": [output]})
    assert request.outputs == {"logit": True}


@pytest.mark.parametrize("parameter", [{"classification": 3}, {"shared_memory_region": "a"}])
def test_an_answer_of_another_kind_is_refused(parameter):
    with pytest.raises(Refusal, match=f"got {next(iter(parameter))} .* for output `score`; need"):
        read({"inputs": [TENSOR], "outputs": [{"name": "score", "parameters": parameter}]})
