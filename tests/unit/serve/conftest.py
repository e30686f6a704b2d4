import pytest


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="package")
def clicks(tmp_path_factory):
    """Raw rows, the dataset prepared from them, and a run on it: ``.rows``, ``.data``, ``.run``."""
    from types import SimpleNamespace

    from raw_clicks import prepared, raw_rows
    from small_run import make_config, train_here

    folder = tmp_path_factory.mktemp("clicks")
    rows = raw_rows(3000)
    data = prepared(folder / "data", rows)
    run, _ = train_here(make_config(data, "train.average=0.9", "train.steps=30"), folder / "run")
    return SimpleNamespace(rows=rows, data=data, run=run.path)
