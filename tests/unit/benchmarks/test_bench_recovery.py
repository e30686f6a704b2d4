"""What topic ``recovery`` says, and that it looks at what is trained again."""

import json
import time

import pytest
from benchmarks.deaths import WatchedRun
from benchmarks.topics import recovery as topic


def test_headlines_compare_with_a_run_that_was_resumed():
    rows = [
        {
            "rows": "1 M",
            "role": "oracle",
            "contender": contender,
            "seconds": seconds,
            "steps_again": 7,
        }
        for contender, seconds in ((topic.FROM_MEMORY, 4.0), (topic.BY_HAND, 10.0))
    ]
    assert topic.headlines("deaths", rows) == [
        "**1 M rows, oracle, pibroch, from memory: 4.0 s, 7 steps again; 2.5x quicker than ended"
        " and resumed**"
    ]


def test_a_step_that_is_trained_again_must_have_its_loss(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with WatchedRun(run, ["false"], goes_on_by_itself=True) as watched:
        for loss, last in ((0.5, 3), (0.5, 2)):
            records = [
                {"kind": "training", "step": step, "loss": loss} for step in range(1, last + 1)
            ]
            (run / "metrics.jsonl").write_text(
                "".join(json.dumps(record) + "\n" for record in records)
            )
            assert watched.step() == last
        (run / "metrics.jsonl").write_text(
            json.dumps({"kind": "training", "step": 3, "loss": 0.25}) + "\n"
        )
        with pytest.raises(AssertionError, match=r"step 3 has loss 0.25, and had 0.5"):
            watched.step()
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="has ended"):
            watched.wait_for(lambda: False)
        assert time.monotonic() - start < 60
