import pytest
from rpc_crew import Crew


@pytest.fixture(scope="session")
def workers():
    """``workers(n)``: a crew of n joined workers that all tests share; they end with the tests."""
    started = {}

    def crew(size):
        if size not in started:
            started[size] = Crew(size)
        return started[size]

    yield crew
    for each in started.values():
        each.close()
