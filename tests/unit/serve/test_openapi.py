"""What the OpenAPI page says may be asked, and what it does not, by schemathesis.

Answers with a reason, never a 5xx.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from pibroch.serve.export import export_checkpoint
from served import serving

schemathesis = pytest.importorskip("schemathesis")
EXAMPLES = int(os.environ.get("PIBROCH_SOAK_EXAMPLES", "12"))
"""Requests of each operation."""


def test_the_page_keeps_its_promises(clicks, tmp_path):
    export_checkpoint(clicks.run, tmp_path / "ctr")
    with serving(tmp_path / "ctr") as server:
        schema = schemathesis.openapi.from_url("http://{}:{}/openapi.json".format(*server.address))
        operations = [result.ok() for result in schema.get_all_operations()]
        assert {"/score", "/v2/models/{model}/infer", "/metrics"} <= {
            each.path for each in operations
        }
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
                assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
                if answer.status_code != 200:
                    assert answer.json()["error"]

            ask()
        assert {200, 400, 404} <= statuses
        assert server.metric("pibroch_requests_open") == 1
