"""`pibroch train` with the exchange `retrieve`: the files of `alltoall`."""

import training_cases as cases
from test_lookahead_train import COMMON, check_same_files, curve

from small_run import make_config


def test_the_same_files_as_alltoall_whoever_shares_memory(worlds, data, expected, tmp_path):
    for hosts in ("[0,0]", "[0,1]"):
        config = make_config(data, *COMMON, "embedding.exchange=retrieve", f"embedding.exchange.hosts={hosts}")
        folder = tmp_path / hosts
        results = worlds(2).run(cases.train, config.model_dump(), str(folder))
        check_same_files(folder, expected)
        assert curve(folder) == curve(expected)
        assert results[0]["summary"].exchange == "retrieve"
