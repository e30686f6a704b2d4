"""Every example runs; those of RPC are in tests/distributed/rpc."""

import ast
import math
import re
from pathlib import Path

from forked import Program, ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_model_learns_and_takes_few_lines():
    path = EXAMPLES / "own_model.py"
    with Program(path) as program:
        ran = program.end(200)
    assert ran.returncode == 0, ran.stderr
    first, last = map(float, re.findall(r"batches (\d\.\d+)", ran.stdout))
    assert last < first - 0.03, ran.stdout
    marked = [line for line in path.read_text().splitlines() if line.endswith("# pibroch")]
    assert len(marked) <= 5


def test_distributed_dlrm_learns_on_two_ranks_and_takes_few_lines():
    path = EXAMPLES / "distributed_dlrm.py"
    output = on_two_ranks(path)
    losses = {
        int(rank): float(loss)
        for rank, loss in re.findall(r"rank (\d): log loss (\d\.\d+)", output)
    }
    assert losses.keys() == {0, 1}
    assert max(losses.values()) < 0.5, output
    assert len(statements(path.read_text())) <= 12
    torchrec = EXAMPLES.parent / "benchmarks" / "peers" / "shortest_dlrm.py"
    assert len(statements(torchrec.read_text())) == 16  # as docs/distributed.md says


def on_two_ranks(*arguments):
    """What both print."""
    with ranks(2, *arguments) as both:
        ran = [each.end(200) for each in both]
    assert [each.returncode for each in ran] == [0, 0], ran
    return "".join(each.stdout for each in ran)


def statements(source):
    """All statements but imports and docstrings: what a line is before a formatter folds it."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def test_save_and_resume_goes_on_with_another_number_of_ranks(tmp_path):
    path = EXAMPLES / "save_and_resume.py"
    losses = []
    assert "rank 1 of 2 begins after step 0" in on_two_ranks(path, tmp_path / "a", 30)
    for folder, begins in ((tmp_path / "a", 30), (tmp_path / "b", 0)):
        with Program(path, folder, 60) as one:
            ran = one.end(200)
        assert ran.returncode == 0 and f"rank 0 of 1 begins after step {begins}" in ran.stdout, (
            ran.stderr
        )
        losses.append(float(re.search(r"loss (\d\.\d+)", ran.stdout)[1]))
    assert abs(losses[0] - losses[1]) < 1e-3 and losses[0] < 0.65


def test_sequences_learns_and_so_it_does_on_two_ranks():
    path = EXAMPLES / "sequences.py"
    with Program(path) as program:
        alone = program.end(200)
    assert alone.returncode == 0, alone.stderr
    losses = [
        float(loss)
        for loss in re.findall(r"rank \d: log loss (\d\.\d+)", alone.stdout + on_two_ranks(path))
    ]
    assert len(losses) == 3
    assert max(losses) < 0.2


def test_two_towers_retrieve_items_of_the_users_kind(tmp_path):
    with Program(EXAMPLES / "two_towers.py", tmp_path / "out") as program:
        ran = program.end(200)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.split()[-1]) > 0.99, ran.stdout


def test_stream_serves_what_it_has_learned_a_moment_ago(tmp_path):
    line = ["--seconds", 36, "--rate", 400, "--window", 4]
    with Program(EXAMPLES / "stream.py", tmp_path / "out", *line) as program:
        ran = program.end(280)
    assert ran.returncode == 0, ran.stderr
    rows = [[*map(float, row.split())] for row in re.findall(r"^ +\d.*", ran.stdout, re.MULTILINE)]
    assert rows, ran.stdout
    for _, best, served, _ in rows:
        assert 0.55 < served < best + 0.02, "nobody has trained on it before"
    assert not all(math.isnan(frozen) for *_, frozen in rows)
    p50, p99 = map(float, re.findall(r"p\d\d ([\d.]+) s", ran.stdout))
    assert 0 < p50 <= p99
    assert (tmp_path / "out" / "stream.svg").read_text().count("<path") > 3
    figures = (tmp_path / "out" / "run" / "metrics.jsonl").read_text()
    assert '"kind": "window"' in figures


def test_bounded_lag_gives_the_same_scores_for_every_bound():
    path = EXAMPLES / "bounded_lag.py"
    output = on_two_ranks(path)
    matches = re.findall(r"rank (\d): k = (\d), sum of scores (\d+\.\d+)", output)
    assert {(rank, bound) for rank, bound, _ in matches} == {
        (rank, bound) for rank in "01" for bound in "04"
    }
    assert len({(rank, total) for rank, _, total in matches}) == 2, output
