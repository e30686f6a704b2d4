"""What topic ``tables`` compares: equal work for all, and workers that agree."""

from dataclasses import replace

from benchmarks.agreement import check_agreement
from benchmarks.contender import Contender, ContenderSpec
from benchmarks.environments import our_python
from benchmarks.topics import tables as topic
from benchmarks.workers.tables_heads import ONE_WIDTH, WIDTHS

from pibroch.ports import free_port


def test_one_width_is_as_wide_as_many():
    assert sum(WIDTHS) == ONE_WIDTH * len(WIDTHS)
    assert len(set(WIDTHS)) == 5


def test_everyone_is_compared_with_one_like_itself():
    for setting in topic.SETTINGS:
        labels = [spec.label for spec in topic.lineup_of(setting).specs]
        for exchange in setting.exchanges:
            assert topic.label_of(exchange) in labels
            assert (topic.label_of(exchange) + topic.ONE_WIDTH_LABEL in labels) == (
                setting.what == "widths"
            )


def test_exchanges_agree(small_case):
    """The workers as they run, one rank each.

    TorchRec's are compared with them whenever the topic measures.
    """
    case = replace(small_case, dim=0, sparse_optimizer="rowwise_adagrad")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    workers = [("tables_pibroch:build", "local"), ("tables_pibroch:build", "lookahead")]
    running = [
        Contender(
            ContenderSpec(
                exchange, worker, our_python(), (), environment | {"MASTER_PORT": str(free_port())}
            )
        )
        for worker, exchange in workers
    ]
    with running[0], running[1]:
        for contender in running:
            contender.setup(replace(case, exchange_options={"exchange": contender.spec.label}))
        assert check_agreement(running).largest["loss"] < 1e-6
