"""The tiers of tests, said in one place: `make test`, `make test-all` and `make soak`.

`make test` runs what is not marked `full`, `make test-all` the rest. `make soak` runs those of
:data:`SOAK` and :data:`SHORT` again, at the length that its environment variables ask for.

A test is `full` when one of these holds:

1. the longest entry of :data:`TIERS` that its name begins with says so;
2. its argument ``size`` asks the fixture ``worlds`` for other than two ranks: one process is what
   ``test_exchange.py`` is about;
3. it has a long form (:data:`SOAK`), is marked `slow` or `alone`, or hypothesis draws its input;
4. it is marked `full` where it stands.
"""

import pytest

TIERS = {
    "": "test",
    # the contract of exchanges in one process and with two ranks; what else they promise is full
    "tests/conformance/": "full",
    "tests/conformance/test_exchange.py": "test",
    "tests/conformance/test_world.py": "test",
    # many processes
    "tests/distributed/": "full",
    "tests/distributed/rpc/test_examples.py": "test",
    "tests/unit/wire/test_segments.py": "full",
    "tests/unit/serve/test_connections.py": "full",
    "tests/unit/serve/test_delta.py": "full",
    "tests/unit/serve/test_dense_onnx.py": "full",
    "tests/unit/serve/test_readme.py": "full",
    "tests/unit/serve/test_refusals.py": "full",
    "tests/unit/serve/test_reload.py": "full",
    "tests/unit/serve/test_rollback.py": "full",
    "tests/unit/test_examples.py::test_stream": "full",
    "tests/unit/test_examples.py::test_two_towers": "full",
    "tests/unit/serve/test_split_rows.py": "full",
    "tests/unit/test_portability.py": "full",
    "tests/unit/test_retries.py": "full",
    "tests/unit/test_uncompiled_kernels.py": "full",
    # workers, peers and labs
    "tests/unit/benchmarks/": "full",
    "tests/unit/benchmarks/test_figures.py": "test",
    # seconds of one core each
    "tests/golden/test_curves.py::test_the_planted_truth": "full",
    "tests/unit/cli/test_commands.py::test_doctor_compiles": "full",
    "tests/unit/cli/test_output_places.py": "full",
    "tests/unit/cli/test_search.py": "full",
    "tests/unit/collectives/test_lag_window.py": "full",
    "tests/unit/data/test_batch.py::test_no_malformed_batch": "full",
    "tests/unit/data/test_prepare.py::test_killed_anywhere": "full",
    "tests/unit/data/test_prepare.py::test_memory_does_not_grow": "full",
    "tests/unit/data/test_prepare.py::test_the_real_sample": "full",
    "tests/unit/data/test_synthetic.py::test_memory_does_not_grow": "full",
    "tests/unit/state/test_tables.py::test_any_plan_loads": "full",
    "tests/unit/embedding/test_memory_room.py": "full",
    "tests/unit/embedding/test_pretrained.py::test_a_large_matrix": "full",
    "tests/unit/exchange/test_assignment.py::test_of_": "full",
    "tests/unit/exchange/lookahead/test_oracle.py::test_plans_of_many_ranks": "full",
    "tests/unit/exchange/lookahead/test_oracle.py::test_the_window_may_need": "full",
    "tests/unit/kernels/test_policy.py::test_processes_that": "full",
    "tests/unit/planner/test_drift.py": "full",
    "tests/unit/train/test_all_items.py": "full",
    "tests/unit/planner/test_make.py::test_hundreds_of_shards": "full",
    "tests/unit/planner/test_make.py::test_no_baseline": "full",
    "tests/unit/planner/test_search.py": "full",
    "tests/unit/planner/test_towers.py": "full",
}
"""What names of tests begin with, and their tier."""
SOAK = (
    "tests/conformance/test_assigned.py::test_an_assigned_run_is",
    "tests/conformance/test_lagged_transport.py::test_every_part",
    "tests/conformance/test_lookahead.py::test_same_bits_for_every_optimizer",
    "tests/conformance/test_raw_ids.py::test_a_program_of_four",
    "tests/conformance/test_raw_ids.py::test_exchanges_agree",
    "tests/conformance/test_raw_ids.py::test_with_rows_on_servers",
    "tests/conformance/test_row_plans.py::test_alltoall_with_copies",
    "tests/conformance/test_row_plans.py::test_lookahead_gives",
    "tests/conformance/test_traces.py::test_order",
    "tests/conformance/test_world.py::test_steps_equal",
    "tests/distributed/rpc/test_hostile.py::test_a_bombardment",
    "tests/distributed/rpc/test_torch_suites.py",
    "tests/distributed/test_lab.py",
    "tests/distributed/test_pairs.py",
    "tests/distributed/test_publishing.py::test_a_server_follows",
    "tests/distributed/test_raw_ids_train.py",
    "tests/distributed/test_recovery.py::test_cuts",
    "tests/distributed/test_recovery.py::test_random_kills",
    "tests/distributed/test_row_index_train.py::test_a_killed",
    "tests/distributed/test_row_index_train.py::test_it_is_saved",
    "tests/distributed/test_stream_strokes.py",
    "tests/distributed/test_streams_kills.py",
    "tests/distributed/test_streams_soak.py",
    "tests/distributed/test_streams_train.py::test_a_signal",
    "tests/distributed/test_streams_train.py::test_killed_ranks_train_each_event",
    "tests/unit/benchmarks/test_bench_contenders.py::test_a_rank_trains",
    "tests/unit/data/streams/test_kafka_strokes.py",
    "tests/unit/data/streams/test_strokes.py",
    "tests/unit/data/test_hostile_files.py",
    "tests/unit/embedding/test_hashed.py::test_an_index_that_was",
    "tests/unit/embedding/test_hashed.py::test_any_schedule",
    "tests/unit/embedding/test_hashed.py::test_ids_given",
    "tests/unit/embedding/test_hashed.py::test_order_within",
    "tests/unit/exchange/lookahead/test_oracle.py::test_as_many_ranks",
    "tests/unit/exchange/lookahead/test_oracle.py::test_every_read",
    "tests/unit/exchange/lookahead/test_oracle.py::test_plans_of_many",
    "tests/unit/observability/test_exposition.py::test_idle_connections",
    "tests/unit/rpc/test_fuzz_callables.py",
    "tests/unit/serve/test_aot.py::test_a_program_in_cpp",
    "tests/unit/serve/test_connections.py::test_health_beside_connections",
    "tests/unit/serve/test_delta_reload.py",
    "tests/unit/serve/test_inference_protocol.py::test_a_request_is_read",
    "tests/unit/serve/test_mutations.py",
    "tests/unit/serve/test_one_reading.py",
    "tests/unit/serve/test_openapi.py",
    "tests/unit/serve/test_refusals.py::test_thousands",
    "tests/unit/test_uncompiled_kernels.py",
    "tests/unit/wire/test_every_listener.py",
)
"""What tests that have a long form begin with; the short one is full."""
SHORT = (
    "tests/conformance/test_exchange.py::test_steps_equal",
    "tests/conformance/test_exchange.py::test_the_number_of_threads",
)
"""The same, of which the short form takes little enough to stay in its tier."""


def is_full(item: pytest.Item) -> bool:
    """Whether a test is for `make test-all`."""
    if any(map(item.get_closest_marker, ("full", "slow", "alone"))) or item.nodeid.startswith(SOAK):
        return True
    if isinstance(item, pytest.Function):
        if getattr(item.obj, "is_hypothesis_test", False):
            return True
        num_ranks = item.callspec.params.get("size", 2) if hasattr(item, "callspec") else 2
        if "worlds" in item.fixturenames and num_ranks != 2:
            return True
    return TIERS[max(filter(item.nodeid.startswith, TIERS), key=len)] == "full"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by what is marked here
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SOAK + SHORT):
            item.add_marker("soak")
        if is_full(item):
            item.add_marker("full")
