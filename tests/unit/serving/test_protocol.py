"""What a request may say, what is refused and how, and what the answer says: without a server."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runtime.errors import InputError
from elastic_runtime.models import ModelConfig, TensorSpec
from elastic_runtime.serving import protocol
from elastic_runtime.serving.protocol import encode_answer, input_tensors, output_tensors, parse_request

CLASSIFIER = ModelConfig(
    task="classification",
    target="colour",
    features=("a", "b", "c"),
    classes=("rot", "grün"),
    input=TensorSpec(name="features", shape=(-1, 3)),
    output=TensorSpec(name="logits", shape=(-1, 2)),
)
REGRESSOR = ModelConfig(
    task="regression",
    target="price",
    features=("a", "b", "c"),
    classes=None,
    input=TensorSpec(name="features", shape=(-1, 3)),
    output=TensorSpec(name="predictions", shape=(-1,)),
)
IMAGES = ModelConfig(
    task="regression",
    target="price",
    features=tuple("abcdef"),
    classes=None,
    input=TensorSpec(name="features", shape=(-1, 2, 3)),
    output=TensorSpec(name="predictions", shape=(-1, 1)),
)
TENSOR: dict[str, Any] = {"name": "features", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}


def body(**changes: Any) -> bytes:
    """A right request, with fields of its tensor changed; a field given as None is left out."""
    tensor = {key: value for key, value in {**TENSOR, **changes}.items() if value is not None}
    return json.dumps({"inputs": [tensor]}).encode()


def test_a_right_request() -> None:
    request = parse_request(body(), CLASSIFIER)
    np.testing.assert_array_equal(request.rows, np.arange(1, 7, dtype=np.float32).reshape(2, 3))
    assert request.rows.dtype == np.float32
    assert request.id is None
    assert request.outputs == ("logits", "label", "probability")
    assert request.binary == frozenset()


@pytest.mark.parametrize("data", [[[1, 2, 3], [4, 5, 6]], [1.0, 2, 3, 4, 5, 6e0]])
def test_data_nested_as_its_shape_says(data: list[Any]) -> None:
    np.testing.assert_array_equal(parse_request(body(data=data), CLASSIFIER).rows, [[1, 2, 3], [4, 5, 6]])


def test_rows_of_more_than_one_dimension() -> None:
    nested = [[[1, 2, 3], [4, 5, 6]]]
    for data in (nested, [1, 2, 3, 4, 5, 6]):
        request = parse_request(body(shape=[1, 2, 3], data=data), IMAGES)
        np.testing.assert_array_equal(request.rows, [[1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b"[]", "the body: expected a JSON object, given a list"),
        (b"null", "the body: expected a JSON object, given null"),
        (b"{}", "inputs: is missing"),
        (b'{"inputs": {}}', "inputs: expected a list, given an object"),
        (b'{"inputs": []}', "inputs: expected 1 tensor, 'features', given 0"),
        (b'{"inputs": [{}, {}]}', "given 2"),
        (b'{"inputs": [3]}', r"inputs\[0\]: expected a JSON object, given a number"),
        (b'{"id": 3, "inputs": []}', "id: expected text, given a number"),
        (body(name=None), "inputs.0..name: expected 'features', given None"),
        (body(name="x"), "inputs.0..name: expected 'features', given 'x'"),
        (body(datatype=None), "features.datatype: expected 'FP32', given None"),
        (body(datatype="INT64"), "features.datatype: expected 'FP32', given 'INT64'"),
        (body(datatype=["FP32"]), "features.datatype"),
        (body(shape=None), "features.shape: is missing"),
        (body(shape="2,3"), "features.shape: expected a list, given text"),
        (body(shape=[]), r"features.shape: expected \[n, 3\], given \[\]"),
        (body(shape=[3], data=[1]), r"features.shape: expected \[n, 3\], given \[3\]"),
        (body(shape=[2, 4]), r"features.shape: expected \[n, 3\], given \[2, 4\]"),
        (body(shape=[2, 3, 1]), r"features.shape: expected \[n, 3\], given \[2, 3, 1\]"),
        (body(shape=[0, 3], data=[]), "at least one row"),
        (body(shape=[-1, 3]), "at least one row"),
        (body(shape=[2.0, 3]), "features.shape: expected whole numbers"),
        (body(shape=[True, 3]), "features.shape: expected whole numbers"),
        (body(shape=[10**15, 3]), "expects 3000000000000000 values, given 6"),
        (b'{"id": "\\ud800", "inputs": []}', "id: expected text that is valid Unicode"),
        (body(data=None), "features.data: is missing"),
        (body(data="1,2"), "features.data: expected a list, given text"),
        (body(data=[1]), r"features.data: shape \[2, 3\] expects 6 values, given 1"),
        (body(data=[]), "expects 6 values, given 0"),
        (body(data=[1, 2, "3", 4, 5, 6]), r"features.data\[2\]: expected a number, given text \('3'\)"),
        (body(data=[1, 2, None, 4, 5, 6]), r"features.data\[2\]: expected a number, given null"),
        (body(data=[1, 2, True, 4, 5, 6]), r"features.data\[2\]: expected a number, given true or false"),
        (body(data=[1, 2, 3, 4, 5, [6]]), r"features.data\[5\]: expected a number, given a list"),
        (
            body(data=[1, 2, 3, 4, 5, 1e39]),
            r"features.data\[5\]: expected a finite FP32 number, given 1e\+39",
        ),
        (body(data=[1, 2, 3, 4, 5, 10**400]), "not JSON|too large for FP32|not.* number"),
        (body(data=[1, 2, 3, 4, 5, float("nan")]), "the body holds NaN"),
        (body(data=[1, 2, 3, 4, 5, float("inf")]), "the body holds Infinity"),
        (body(data=[[1, 2, 3], [4, 5]]), "nested data expects lists of 3 for shape .*, given one of 2"),
        (body(data=[[1, 2, 3], 4, 5, 6]), "nested data expects 2 rows"),
        (body(data=[[1, 2, 3], 4]), "nested data expects lists of 3 for shape .*, given a number"),
        (body(data=[[1, 2, 3, 4, 5, 6]]), "nested data expects 2 rows for shape .*, given 1"),
        (
            body(data=[[[1], [2], [3]], [[4], [5], [6]]]),
            r"features.data\[0\]: expected a number, given a list",
        ),
    ],
)
@pytest.mark.usefixtures("encoder")
def test_a_wrong_request_is_refused_by_name(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_request(content, CLASSIFIER)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outputs": 3}, "outputs: expected a list"),
        ({"outputs": [{}]}, "outputs.0..name: expected one of logits, label, probability, given 'None'"),
        ({"outputs": [{"name": "x"}]}, "given 'x'"),
        ({"outputs": [{"name": "label"}, {"name": "label"}]}, "'label' is asked for twice"),
        (
            {"outputs": [{"name": "label", "parameters": {"binary_data": 1}}]},
            "binary_data: expected true or false",
        ),
        ({"parameters": []}, "parameters: expected a JSON object"),
    ],
)
def test_wrong_wishes_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_request(json.dumps({"inputs": [TENSOR], **more}).encode(), CLASSIFIER)


@pytest.fixture(params=["orjson", "json"])
def encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With orjson, and without as where kserve is not installed."""
    if request.param == "json":
        monkeypatch.setattr(protocol, "orjson", None)


@pytest.mark.usefixtures("encoder")
def test_the_answer_of_a_classifier() -> None:
    request = parse_request(body(), CLASSIFIER)
    output = np.array([[0.0, 0.0], [1.0, 3.0]], dtype=np.float32)
    answer = encode_answer(request, output, CLASSIFIER, model="m", identity="7")
    assert answer.json_length is None
    document = json.loads(answer.body)
    assert document["model_name"] == "m"
    assert document["id"] == "7"
    by_name = {tensor.pop("name"): tensor for tensor in document["outputs"]}
    assert by_name["logits"] == {"shape": [2, 2], "datatype": "FP32", "data": [0.0, 0.0, 1.0, 3.0]}
    assert by_name["label"] == {"shape": [2], "datatype": "BYTES", "data": ["rot", "grün"]}
    e = np.exp(2)
    np.testing.assert_allclose(
        by_name["probability"]["data"], [0.5, 0.5, 1 / (1 + e), e / (1 + e)], rtol=1e-6
    )
    described = {tensor["name"]: tensor for tensor in output_tensors(CLASSIFIER)}
    assert list(described) == ["logits", "label", "probability"]
    for name, tensor in by_name.items():
        assert tensor["datatype"] == described[name]["datatype"]
        assert len(tensor["shape"]) == len(described[name]["shape"])


@pytest.mark.usefixtures("encoder")
def test_the_answer_of_a_regressor_and_the_id() -> None:
    request = parse_request(json.dumps({"id": "mine", "inputs": [TENSOR]}).encode(), REGRESSOR)
    answer = encode_answer(request, np.array([0.1, 2.0], np.float32), REGRESSOR, model="m", identity="7")
    document = json.loads(answer.body)
    assert document["id"] == "mine"
    (tensor,) = document["outputs"]
    assert (tensor["name"], tensor["shape"]) == ("predictions", [2])
    assert np.array(tensor["data"], dtype=np.float32).tolist() == np.array([0.1, 2.0], np.float32).tolist()
    assert input_tensors(REGRESSOR) == [{"name": "features", "shape": [-1, 3], "datatype": "FP32"}]


@pytest.mark.usefixtures("encoder")
def test_every_bit_of_fp32_survives() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    content = body(shape=[len(values), 3], data=[1] * (3 * len(values)))
    answer = encode_answer(parse_request(content, REGRESSOR), values, REGRESSOR, model="m", identity="7")
    data = json.loads(answer.body)["outputs"][0]["data"]
    assert np.array(data, dtype=np.float32).tobytes() == values.tobytes()


def test_only_what_is_asked_for_is_answered() -> None:
    request = parse_request(
        json.dumps({"inputs": [TENSOR], "outputs": [{"name": "label"}]}).encode(), CLASSIFIER
    )
    answer = encode_answer(request, np.zeros((2, 2), np.float32), CLASSIFIER, model="m", identity="7")
    assert [tensor["name"] for tensor in json.loads(answer.body)["outputs"]] == ["label"]


def test_large_logits_do_not_overflow_the_probabilities() -> None:
    request = parse_request(body(), CLASSIFIER)
    output = np.array([[1e30, -1e30], [-500.0, 500.0]], dtype=np.float32)
    document = json.loads(encode_answer(request, output, CLASSIFIER, model="m", identity="7").body)
    assert document["outputs"][2]["data"] == [1.0, 0.0, 0.0, 1.0]


def test_an_output_that_overflows_is_the_requests_fault() -> None:
    request = parse_request(body(data=[1, 2, 3, 4, 3e38, 6]), CLASSIFIER)
    output = np.array([[0, 0], [np.inf, 0]], dtype=np.float32)
    with pytest.raises(InputError, match=r"features: row 1 .* up to 3e\+38"):
        encode_answer(request, output, CLASSIFIER, model="m", identity="7")


def binary_request(values: np.ndarray, **changes: Any) -> tuple[bytes, str]:
    raw = values.astype("<f4").tobytes()
    tensor = {"name": "features", "shape": list(values.shape), "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    text = json.dumps(
        {"inputs": [{**tensor, **changes}], "parameters": {"binary_data_output": True}}
    ).encode()
    return text + raw, str(len(text))


def test_raw_bytes_in_and_out() -> None:
    values = np.array([[0.1, -2, 3], [4, 5, 6]], dtype=np.float32)
    content, length = binary_request(values)
    request = parse_request(content, CLASSIFIER, json_length=length)
    np.testing.assert_array_equal(request.rows, values)
    output = np.array([[1.5, 0.0], [1.0, 3.0]], dtype=np.float32)
    answer = encode_answer(request, output, CLASSIFIER, model="m", identity="7")
    assert answer.json_length is not None
    document = json.loads(answer.body[: answer.json_length])
    raw = answer.body[answer.json_length :]
    parts = {}
    for tensor in document["outputs"]:
        size = tensor["parameters"]["binary_data_size"]
        parts[tensor["name"]], raw = raw[:size], raw[size:]
        assert "data" not in tensor
    assert raw == b""
    np.testing.assert_array_equal(np.frombuffer(parts["logits"], "<f4").reshape(2, 2), output)
    assert parts["label"] == struct.pack("<I", 3) + b"rot" + struct.pack("<I", 5) + "grün".encode()


@pytest.mark.parametrize(
    ("changes", "length", "cut", "message"),
    [
        ({}, "x", 0, "Inference-Header-Content-Length: expected the length"),
        ({}, "-1", 0, "Inference-Header-Content-Length"),
        ({}, "999999", 0, "Inference-Header-Content-Length"),
        ({}, "9" * 5000, 0, "Inference-Header-Content-Length"),
        ({}, None, 4, "expected 24 raw bytes after the JSON, given 20"),
        ({"parameters": {"binary_data_size": 20}}, None, 0, "binary_data_size: expected 24"),
        ({"parameters": {"binary_data_size": "24"}}, None, 0, "binary_data_size: expected 24"),
        ({"parameters": None, "data": [0] * 6}, None, 0, "24 raw bytes follow the JSON"),
    ],
)
def test_wrong_raw_bytes_are_refused(
    changes: dict[str, Any], length: str | None, cut: int, message: str
) -> None:
    content, right = binary_request(np.ones((2, 3)), **changes)
    with pytest.raises(InputError, match=message):
        parse_request(content[: len(content) - cut], CLASSIFIER, json_length=length or right)


def test_nan_in_raw_bytes_is_refused() -> None:
    content, length = binary_request(np.array([[1, 2, np.nan]]))
    with pytest.raises(InputError, match=r"features.data\[2\]: expected a finite FP32 number, given nan"):
        parse_request(content, CLASSIFIER, json_length=length)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, database=None)
@given(field=st.sampled_from([*TENSOR, "parameters"]), value=JSON)
def test_any_json_in_any_field_is_answered_or_refused(field: str, value: Any) -> None:
    """Nothing that a request can hold makes any other error, which would be the server's fault."""
    content = json.dumps({"inputs": [{**TENSOR, field: value}]}).encode()
    try:
        request = parse_request(content, CLASSIFIER)
    except InputError:
        return
    assert request.rows.shape[1] == 3
    assert np.isfinite(request.rows).all()


@settings(deadline=None, database=None)
@given(key=st.sampled_from(["id", "inputs", "outputs", "parameters"]), value=JSON)
def test_any_json_in_any_part_is_answered_or_refused(key: str, value: Any) -> None:
    content = json.dumps({"inputs": [TENSOR], key: value}).encode()
    try:
        request = parse_request(content, CLASSIFIER)
    except InputError:
        return
    output = np.zeros((len(request.rows), 2), np.float32)
    encode_answer(request, output, CLASSIFIER, model="m", identity="7")


@settings(deadline=None, database=None)
@given(content=st.binary(max_size=60), length=st.none() | st.text(max_size=5))
def test_any_bytes_are_refused(content: bytes, length: str | None) -> None:
    with pytest.raises(InputError):
        parse_request(content, CLASSIFIER, json_length=length)
