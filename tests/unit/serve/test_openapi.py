"""What the OpenAPI page says may be asked, and what it does not, by schemathesis.

Answers with a reason, never a 5xx.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from pibroch.serve.export import export_checkpoint
from served import check_documented, serving

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
EXAMPLES = int(os.environ.get("PIBROCH_SOAK_EXAMPLES", "12"))
"""Requests of each operation."""


@pytest.fixture(scope="module")
def server(clicks, tmp_path_factory):
    export = tmp_path_factory.mktemp("served") / "ctr"
    export_checkpoint(clicks.run, export)
    with serving(export) as server:
        yield server


def test_answers_are_what_the_page_says(server, clicks):
    metadata = server.ask("GET", "/v2/models/ctr").json
    rows = {"rows": clicks.rows[:2]}
    tensors = [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [clicks.rows[0][name]]}
        for name in (each["name"] for each in metadata["raw_inputs"])
    ]
    wanted = [{"name": each["name"]} for each in metadata["outputs"]]
    infer = {"inputs": tensors, "outputs": wanted, "id": "7"}
    binary = {**infer, "parameters": {"binary_data_output": True}}
    bodies = {"score": [rows], "embed": [rows], "infer": [infer, binary]}
    page = server.ask("GET", "/openapi.json").json

    def check(method, path, status, body=None, headers=None, model="ctr"):
        named = path.format(model=model, version=metadata["versions"][0])
        answer = server.ask(method, named, body, headers)
        assert answer.status == status, answer.body
        check_documented(page, method, path, answer)

    for path, operations in page["paths"].items():
        for method in operations:
            for body in bodies.get(path.rpartition("/")[2], [None]):
                check(method.upper(), path, 200 if path != "/retrieve" else 404, body)
    check("POST", "/score", 200, rows, {"accept": "text/csv"})
    check("POST", "/embed", 200, rows, {"accept": "application/octet-stream"})
    check("POST", "/score", 400, {"rows": []})
    check("POST", "/score", 415, rows, {"content-encoding": "br"})
    check("GET", "/v2/models/{model}/ready", 404, model="other")


def test_the_page_keeps_its_promises(server):
    schema = schemathesis.openapi.from_url("http://{}:{}/openapi.json".format(*server.address))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {"/score", "/v2/models/{model}/infer", "/metrics"} <= {each.path for each in operations}
    statuses = set()
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case):
            answer = case.call(timeout=60)
            statuses.add(answer.status_code)
            as_said = [checks.status_code_conformance, checks.content_type_conformance]
            case.validate_response(answer, checks=[*as_said, checks.response_schema_conformance])
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
            if answer.status_code != 200:
                assert answer.json()["error"]

        ask()
    assert {200, 400, 404} <= statuses
    assert server.metric("pibroch_requests_open") == 1
