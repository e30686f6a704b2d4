"""What ``/openapi.json`` says: requests and answers of each endpoint, as OpenAPI 3.1 has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pibroch.data.schema import Schema
from pibroch.serve.endpoints import Endpoint
from pibroch.serve.raw_body import MOST_ITEMS
from pibroch.version import __version__

Json = dict[str, Any]
_JSON = "application/json"
_BINARY = "application/octet-stream"
_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "number"}
_COUNT: Json = {"type": "integer"}
_ANYTHING: Json = {}


def page(title: str, endpoints: Sequence[Endpoint]) -> Json:
    """The document."""
    bodies = "Bodies may be compressed: `Content-Encoding: gzip` or `deflate`."
    info = {"title": title, "version": __version__}
    return {
        "openapi": "3.1.0",
        "info": {**info, "description": f"Scores of a recommendation model. {bodies}"},
        "paths": {each.path: {each.methods[0].lower(): _operation(each)} for each in endpoints},
        "components": {"responses": {"Refused": _content({_JSON: _REFUSED}, "what is needed")}},
    }


def _operation(endpoint: Endpoint) -> Json:
    """An endpoint's docstring, the names in its path, its forms."""
    names = [name for name in ("model", "version") if f"{{{name}}}" in endpoint.path]
    refused = {"$ref": "#/components/responses/Refused"}
    operation = {
        "operationId": f"{endpoint.answer.__name__}{endpoint.path}".translate(_AS_NAMES),
        "description": inspect.getdoc(endpoint.answer),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ],
        "responses": {**endpoint.answers, "4XX": refused, "5XX": refused},
    }
    return operation if endpoint.form is None else {**operation, "requestBody": endpoint.form}


def raw_body(schema: Schema, columns: Sequence[str]) -> Json:
    """Raw rows, or lines as the log has them."""
    in_line = schema.separator.join(schema.columns or schema.used_columns())
    lines = {**_TEXT, "description": f"Lines of {in_line}"}
    rows = _object([], **_rows(columns))
    return {"required": True, **_content({_JSON: rows, "text/csv": lines})}


def users_body(columns: Sequence[str]) -> Json:
    """Raw rows of users."""
    k = {**_or_null(_COUNT), "minimum": 1, "maximum": MOST_ITEMS, "default": 10}
    return {"required": True, **_content({_JSON: _object([], **_rows(columns), k=k)})}


def _rows(columns: Sequence[str]) -> Json:
    row = {"type": "object", "additionalProperties": True, "required": list(columns)}
    return {"rows": _or_null(_list(row)), "columns": _or_null(_object([]))}


def _content(forms: Mapping[str, Json], description: str | None = None) -> Json:
    content: Json = {"content": {kind: {"schema": form} for kind, form in forms.items()}}
    return content if description is None else {"description": description, **content}


def _answer(forms: Mapping[str, Json]) -> Json:
    return {"200": _content(forms, "the answer")}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


def _object(required: Sequence[str], **properties: Json) -> Json:
    form: Json = {"type": "object", "properties": properties}
    return {**form, "required": list(required)} if required else form


def _whole(**properties: Json) -> Json:
    """An object with all of these."""
    return _object(list(properties), **properties)


def _or_null(form: Json) -> Json:
    return {**form, "type": [form["type"], "null"]}


def _of_version(**properties: Json) -> Json:
    """An object with all of these, the version that they are of, and that one's age if known."""
    whole = _whole(model_name=_TEXT, model_version=_TEXT, **properties)
    whole["properties"] |= _AGE
    return whole


def _tensors(**more: Json) -> Json:
    return _list(_object(["name", "shape", "datatype"], **_TENSOR, **more))


_REFUSED = _whole(error=_TEXT)
_AGE: Json = {"model_event_time_ms": _COUNT, "model_age_seconds": _NUMBER}
_PARAMETERS = _or_null(_object([]))
_TENSOR: Json = {"name": _TEXT, "shape": _list(_COUNT), "datatype": _TEXT}
_VALUES: Json = {"data": _or_null(_list(_ANYTHING)), "parameters": _PARAMETERS}
_INFER = _object(
    ["inputs"],
    id=_or_null(_TEXT),
    parameters=_PARAMETERS,
    inputs=_tensors(**_VALUES),
    outputs=_or_null(_list(_object(["name"], name=_TEXT, parameters=_PARAMETERS))),
)
INFER_BODY: Json = {"required": True, **_content({_JSON: _INFER})}
_OUTPUTS = _object(
    ["model_name", "model_version", "outputs"],
    model_name=_TEXT,
    model_version=_TEXT,
    id=_TEXT,
    parameters=_object([], **_AGE),
    outputs=_tensors(data=_list(_NUMBER), parameters=_whole(binary_data_size=_COUNT)),
)
TENSORS = _answer({_JSON: _OUTPUTS, _BINARY: {}})
_SCORE: Json = {"type": ["number", "array"], "items": _NUMBER}
SCORES = _answer({_JSON: _of_version(scores=_list(_SCORE)), "text/csv": _TEXT})
_VECTORS = _list(_list(_list(_NUMBER)))
_EMBEDDINGS = _of_version(features=_list(_TEXT), embeddings=_VECTORS)
EMBEDDINGS = _answer({_JSON: _EMBEDDINGS, _BINARY: {}})
_BEST_ITEMS = _of_version(items=_list(_list(_ANYTHING)), scores=_list(_list(_NUMBER)))
BEST_ITEMS = _answer({_JSON: _BEST_ITEMS})
LIVE = _answer({_JSON: _whole(live={"type": "boolean"})})
_READY = _whole(ready={"type": "boolean"})
READY = {
    **_answer({_JSON: _READY}),
    "503": _content({_JSON: {"anyOf": [_READY, _REFUSED]}}, "not yet, or not any more"),
}
SERVER = _answer({_JSON: _whole(name=_TEXT, version=_TEXT, extensions=_list(_TEXT))})
_OF_MODEL = _object(
    ["name", "versions", "platform", "inputs", "outputs"],
    name=_TEXT,
    versions=_list(_TEXT),
    platform=_TEXT,
    inputs=_tensors(),
    raw_inputs=_tensors(),
    outputs=_tensors(),
    features=_list(_TEXT),
    **_AGE,
)
MODEL = _answer({_JSON: _OF_MODEL})
METRICS = _answer({"text/plain": _TEXT})
_AS_NAMES = str.maketrans({"/": "_", "{": None, "}": None})
DOCS = b"""<!DOCTYPE html>
<title>pibroch</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
<div id="page"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#page"})</script>
"""
