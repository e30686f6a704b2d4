"""The page on extending is the example, word for word.

The conformance suite runs it, and so do two ranks.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import ranks
from pibroch.config.exchange import (
    EXCHANGES,
    ExchangeSection,
    ExchangeSpec,
    exchanges,
    find_exchange,
    register_exchange,
)
from pibroch.errors import ConfigError

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_exchange.py"
PAGE = ROOT / "docs" / "extending.md"


def test_every_block_of_the_page_is_in_the_example():
    source = EXAMPLE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert block.rstrip() in source, block


def test_the_example_runs():
    with ranks(2, EXAMPLE) as both:
        ran = [each.end(200) for each in both]
    assert [each.returncode for each in ran] == [0, 0], ran
    output = "".join(each.stdout for each in ran)
    sizes = dict(re.findall(r"rank (\d): log loss \d\.\d+, (\d+) bytes", output))
    assert sizes == {"0": str(50 * 16 * 4), "1": "0"}  # weights and accumulators of 50 rows


def test_an_installed_package_is_known_to_recipes(tmp_path):
    """As if a distribution with the example were installed.

    Its entry point is its one line of registration.
    """
    (tmp_path / "own_exchange-1.dist-info").mkdir()
    (tmp_path / "own_exchange-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: own-exchange\nVersion: 1\n"
    )
    entry = "[pibroch.exchanges]\nask_first = own_exchange\n"
    (tmp_path / "own_exchange-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "own_exchange.py").write_text(EXAMPLE.read_text())
    program = """
        from pibroch.config import load_recipe
        from pibroch.errors import ConfigError
        chosen = ["embedding.exchange=ask_first"]
        print(load_recipe("synthetic_small", chosen).embedding.exchange.for_ranks(3).name)
        try:
            load_recipe("synthetic_small", [*chosen, "embedding.exchange.wire=float16"])
        except ConfigError as error:
            print(error)
    """
    place = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": place},
    )
    first, second = ran.stdout.splitlines()
    assert first == "ask_first", ran.stderr
    assert "unknown key `embedding.exchange.wire`" in second


def test_a_name_belongs_to_one_exchange(monkeypatch):
    monkeypatch.setattr(EXCHANGES, "_registered", {})
    spec = ExchangeSpec("own", "does nothing", ExchangeSection, print)
    register_exchange(spec)
    register_exchange(spec)
    assert find_exchange("own") is spec and "own" in exchanges()
    with pytest.raises(ConfigError, match="a second exchange 'own'"):
        register_exchange(ExchangeSpec("own", "something else", ExchangeSection, print))
    with pytest.raises(ConfigError, match="a second exchange 'local'"):
        register_exchange(ExchangeSpec("local", "something else", ExchangeSection, print))
    with pytest.raises(ConfigError, match=r"exchange 'other'.*'alltoall'"):
        find_exchange("other")


def test_an_exchange_and_its_options_are_one_object():
    import pibroch as pb
    from pibroch.collectives import Ranks

    def trained(exchange, **options):
        channel = Ranks.alone().open_channel()
        embeddings = pb.Embeddings(
            [pb.Table("a", 9, 2)], pb.SGD(lr=1.0), exchange, channel=channel, **options
        )
        ids = torch.tensor([[3, 8, 3]])
        batch = pb.JaggedBatch.from_one_hot(torch.zeros(3, 0), ["a"], ids, torch.zeros(3))
        for each in embeddings.feed([batch] * 3):
            embeddings(each).sum().backward()
        return type(embeddings.exchange), embeddings.full_state_dict()["embedding_bags.a.weight"]

    for chosen, name, options in (
        (pb.Local(), "local", {}),
        (pb.AllToAll(placement="table_wise"), "alltoall", {"placement": "table_wise"}),
        (pb.Lookahead(cache_rows=np.int64(4)), "lookahead", {"cache_rows": 4}),
        (pb.Retrieve(), "retrieve", {}),
        (pb.Towers(ranks_per_host=1), "towers", {"ranks_per_host": 1}),
    ):
        kind, weights = trained(chosen)
        named, by_name = trained(name, **options)
        assert kind is named and torch.equal(weights, by_name)
    with pytest.raises(
        ConfigError, match=r"\['cache_rows'\] beside Lookahead.*do: write them into"
    ):
        pb.Embeddings([pb.Table("a", 3, 2)], pb.SGD(lr=1.0), pb.Lookahead(), cache_rows=3)


def test_unknown_options_are_refused():
    import pibroch as pb

    for exchange, option in (
        ("local", "none"),
        ("alltoall", "placement"),
        ("lookahead", "cache_rows"),
    ):
        with pytest.raises(
            ConfigError, match=f"option 'lokahead' of exchange '{exchange}'.*{option}"
        ):
            pb.Embeddings([pb.Table("a", 3, 2)], pb.SGD(lr=1.0), exchange=exchange, lokahead=3)
