"""`pibroch simulate` over small data."""

import pytest

from pibroch.cli.main import main
from small_run import make_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture
def simulate(monkeypatch, capsys, data):
    def run(*words):
        common = ["simulate", "synthetic_small", "--data", data, "--samples", 32]
        monkeypatch.setattr("sys.argv", ["pibroch", *map(str, [*common, *words])])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run
