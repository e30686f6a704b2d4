import pytest
from rpc_team import Team


@pytest.fixture(scope="session")
def workers():
    """``workers(n)``: a team of n joined workers that all tests share; they end with the tests."""
    started = {}

    def team(size):
        if size not in started:
            started[size] = Team(size)
        return started[size]

    yield team
    for each in started.values():
        each.close()
