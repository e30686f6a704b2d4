import json
import threading

import pytest

from pibroch.observability.trace import StepTrace, Trace, span, spans


def traced(path, num_steps, taken):
    """Names of the spans in the file of a run of ``taken`` steps; ``None`` without a file."""
    with StepTrace(path, "rank 0", num_steps) as trace:
        for step in range(1, taken + 1):
            trace.next_step()
            with span(str(step)):
                pass
    assert span("after") is span("everything"), "nothing is traced any more"
    return [event["name"] for event in read(path) if event["ph"] == "X"] if path.exists() else None


def read(path):
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("num_steps", "taken", "first", "last"),
    [
        (1000, 1000, 11, 210),
        (1000, 15, 11, 15),
        (210, 210, 11, 210),
        (20, 20, 11, 20),
        (6, 6, 4, 6),
        (1, 1, 1, 1),
    ],
)
def test_which_steps_are_traced(tmp_path, num_steps, taken, first, last):
    assert traced(tmp_path / "t.json", num_steps, taken) == [
        str(step) for step in range(first, last + 1)
    ]


def test_a_run_that_ends_before_leaves_no_file(tmp_path):
    assert traced(tmp_path / "t.json", 1000, 10) is None


def test_a_failed_run_leaves_what_there_is(tmp_path):
    with pytest.raises(ZeroDivisionError), StepTrace(tmp_path / "t.json", "rank 0", 1) as trace:
        trace.next_step()
        with span("fails"):
            raise ZeroDivisionError
    assert [event["name"] for event in read(tmp_path / "t.json") if event["ph"] == "X"] == ["fails"]


def test_a_disk_that_refuses_takes_the_trace_and_not_the_run(tmp_path, caplog):
    (tmp_path / "trace").write_text("in the way")
    traced(tmp_path / "trace" / "t.json", 1, 1)
    assert "there is no trace" in caplog.text


def test_each_thread_has_its_name_and_times_of_one_clock(tmp_path):
    trace = Trace("rank 3")

    def inner():
        with trace.span("inner"):
            pass

    with trace.span("outer"):
        worker = threading.Thread(target=inner, name="worker")
        worker.start()
        worker.join()
    trace.write(tmp_path / "deep" / "t.json")
    events = read(tmp_path / "deep" / "t.json")
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [
        "rank 3",
        "worker",
        "MainThread",
    ]
    within, around = (e for e in events if e["ph"] == "X")
    assert within["tid"] != around["tid"] and within["pid"] == around["pid"]
    assert (
        around["ts"] <= within["ts"]
        and within["ts"] + within["dur"] <= around["ts"] + around["dur"]
    )


def test_spans_around_the_wait_for_each_item(tmp_path):
    with StepTrace(tmp_path / "t.json", "rank 0", 1) as trace:
        trace.next_step()
        assert list(spans("read", iter("ab"))) == ["a", "b"]
    assert [event["name"] for event in read(tmp_path / "t.json") if event["ph"] == "X"] == [
        "read"
    ] * 3
