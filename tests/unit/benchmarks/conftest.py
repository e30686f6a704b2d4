import pytest
from benchmarks.cases import Case
from benchmarks.workloads import Workload


@pytest.fixture(scope="session")
def small_case(tmp_path_factory):
    """Three tables of 97 rows, dim 4, four batches of 32."""
    workload = Workload("zipf", num_batches=4, batch_size=32, num_tables=3, num_rows=97)
    path = workload.write(tmp_path_factory.mktemp("batches"))
    return Case(str(path), dim=4, batch_size=32, num_tables=3, num_rows=97, threads=1)
