import io
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.graph import Graph
from flowrl.runtime.console import open_console
from flowrl.runtime.report import (
    EdgeStatus,
    MeshStatus,
    PlainLines,
    Summary,
    duration,
    end_report,
    number,
    step_line,
)

RECORD = {"step": 100, "loss": 0.421, "reward": 12.8, "kl": 0.15, "lag": 0, "tokens_per_s": 5120.4}
SUMMARY = Summary(
    outcome="done",
    steps=2,
    wall_s=3725.0,
    planned={"rollout": 64, "update": 2},
    executed={"rollout": 64, "update": 2},
    issued=512,
    consumed=500,
    dropped={"timeout": 10, "reward raised": 2},
    written={"metrics": Path("runs/a/metrics.jsonl")},
)


class Stream(io.StringIO):
    """A stream that says what it is."""

    def __init__(self, *, terminal=False, encoding="utf-8"):
        super().__init__()
        self.terminal = terminal
        self._encoding = encoding

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self.terminal


def graph():
    return Graph.build("grpo", [])


def test_a_step_is_one_line_in_the_promised_form():
    assert step_line(RECORD) == "step 100 loss=0.421 reward=12.8 kl=0.150 lag=0 tok/s=5120"


def test_a_lag_is_whole_where_it_is_and_a_mean_where_it_is_not():
    assert " lag=0 " in step_line({**RECORD, "lag": 0.0})
    assert " lag=0.500 " in step_line({**RECORD, "lag": 0.5})


def test_the_losses_of_further_models_stand_before_evaluations():
    record = {**RECORD, "evaluate": 0.5, "critic/loss": 0.25, "critic/grad_norm": 3.0, "entropy": 1.0}
    assert step_line(record).endswith("tok/s=5120 entropy=1.00 critic/loss=0.250 evaluate=0.500")


def test_more_metrics_follow_in_a_fixed_order_and_evaluations_last():
    record = {"evaluate/score": 0.5, "time_s": 3.0, "entropy": 1.25, "note": "text", "time_s_text": "3", **RECORD}
    assert step_line(record).endswith("tok/s=5120 entropy=1.25 time_s=3.00 evaluate/score=0.500")


def test_values_that_are_missing_or_not_finite_are_shown_as_such():
    record = {"step": 1, "loss": math.nan, "reward": None, "lag": math.inf}
    assert step_line(record) == "step 1 loss=nan reward=- kl=- lag=inf tok/s=-"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0, "0"), (1.0, "1.00"), (-0.05, "-0.0500"), (999.9, "1000"), (123.4, "123"), (5120.7, "5121"),
     (1e-6, "1.00e-06"), (12345678.0, "1.23e+07"), (True, "-"), ("x", "-"), (2048, "2048")],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_lost_ones(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations_are_read_as_a_clock(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_print_steps_on_stdout_and_everything_else_on_stderr():
    out, err = Stream(), Stream()
    console = PlainLines(out, err)
    console.start(graph(), 200, Path("runs/a"), first_step=99)
    console.step(RECORD)
    console.warn("mesh 'score' is slow")
    console.status([], [])
    console.stop(SUMMARY)
    console.stop(SUMMARY)
    assert out.getvalue() == step_line(RECORD) + "\n"
    lines = err.getvalue().splitlines()
    assert lines[0] == "flowrl: graph 'grpo', 200 steps, from step 99, run folder runs/a"
    assert lines[1] == "warning: mesh 'score' is slow"
    assert "\n".join(lines[2:]) == end_report(SUMMARY)


def test_a_closed_pipe_does_not_end_the_run():
    class Closed(Stream):
        def write(self, text):
            raise BrokenPipeError

    console = PlainLines(Closed(), Closed())
    console.step(RECORD)
    console.warn("still here")
    console.stop(SUMMARY)


def test_a_narrow_encoding_prints_a_question_mark_for_what_it_lacks():
    class Narrow(Stream):
        def write(self, text):
            text.encode("ascii")
            return super().write(text)

    err = Narrow(encoding="ascii")
    PlainLines(Stream(), err).warn("Grüße")
    assert err.getvalue() == "warning: Gr??e\n"


def test_the_end_report_compares_planned_with_executed_and_names_every_fate():
    assert end_report(SUMMARY).splitlines() == [
        "done: 2 steps in 1:02:05",
        "  node       planned   executed",
        "  rollout         64         64",
        "  update           2          2",
        "  rows: 512 issued = 500 consumed + 12 dropped (timeout 10, reward raised 2)",
        "  metrics: runs/a/metrics.jsonl",
    ]
    assert SUMMARY.problems == []


def test_sums_that_do_not_add_up_are_said_in_words():
    summary = Summary(
        outcome="done", steps=1, wall_s=1, planned={"kl": 1}, executed={"kl": 0}, issued=8, consumed=6, in_flight=1
    )
    assert summary.problems == [
        "8 rows were issued, but 6 consumed + 0 dropped + 1 in flight are 7",
        "1 rows were neither consumed nor dropped",
        "node 'kl' took 0 rows, 1 were planned",
    ]
    report = end_report(summary)
    assert "<- differs" in report
    assert "  does not add up: node 'kl' took 0 rows, 1 were planned" in report


def test_an_interrupted_run_may_leave_rows_in_flight():
    firings = {"planned": {"a": 2}, "executed": {"a": 1}}
    summary = Summary(outcome="interrupted", steps=1, wall_s=1, issued=3, in_flight=3, **firings)
    assert summary.problems == []
    assert "+ 3 in flight" in end_report(summary)


def test_a_pipe_gets_plain_lines_and_a_terminal_the_live_view(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert type(open_console(Stream(), Stream())).__name__ == "PlainLines"
    assert type(open_console(Stream(terminal=True), Stream())).__name__ == "LiveView"
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_console(Stream(terminal=True), Stream())).__name__ == "PlainLines"


def frame(view, width=100):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, legacy_windows=False).print(view.frame())
    return out.getvalue()


def live_view(**streams):
    from flowrl.runtime.live import LiveView

    return LiveView(streams.get("out", Stream(terminal=True)), streams.get("err", Stream()))


def test_the_live_view_shows_steps_rewards_queues_with_their_reason_and_meshes():
    view = live_view()
    for step in range(9):
        view.step({**RECORD, "step": step, "reward": float(step)})
    view.status(
        [
            EdgeStatus(source="prompts", target="rollout", rows=32, bound=64),
            EdgeStatus(source="rollout", target="score", rows=64, bound=64, reason="4 workers are busy"),
        ],
        [MeshStatus(name="train", busy=0.834, doing="rollout"), MeshStatus(name="score", busy=1.0)],
    )
    text = frame(view)
    assert "▁▂▃▄▅▅▆▇█" in text or "▁▂▃▄▄▅▆▇█" in text
    assert "prompts → rollout  32 / 64" in text
    assert "4 workers are busy" in text
    assert "83%" in text
    assert "idle" in text
    assert "5120" in text
    assert " 2 " not in text.split("reward")[0]


def test_the_time_left_is_told_from_the_steps_after_the_first_which_loads_the_models(monkeypatch):
    from flowrl.runtime import live

    clock = iter([100.0, 100.0, 110.0, 112.0, 112.0])  # made, begun, first step, and twice for the frame
    monkeypatch.setattr(live.time, "monotonic", lambda: next(clock))
    view = live_view()
    view._num_steps, view._begun = 10, live.time.monotonic()
    for _ in range(3):
        view.step(RECORD)
    assert "0:12 elapsed · 0:07 left" in frame(view)


def test_the_live_view_shows_the_edges_that_wait_when_there_are_too_many():
    view = live_view()
    edges = [EdgeStatus(source="a", target=f"b{i}", rows=i, bound=100) for i in range(40)]
    view.status([*edges, EdgeStatus(source="x", target="y", rows=0, bound=100, reason="no version yet")], [])
    text = frame(view)
    assert "no version yet" in text
    assert "b39" in text
    assert "a → b2 " not in text
    assert "and 29 more, less full" in text


def test_names_with_markup_are_shown_as_they_are():
    view = live_view()
    edge = EdgeStatus(source="[red]a[/]", target="b", rows=1, reason="[bold]x")
    view.status([edge], [MeshStatus(name="[m]", busy=0)])
    text = frame(view)
    assert "[red]a[/] → b" in text
    assert "[bold]x" in text
    assert "[m]" in text


def test_a_gap_in_the_rewards_is_a_gap_in_the_sparkline():
    from flowrl.runtime.live import sparkline

    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([math.nan]) == ""
    assert sparkline([2.0, 2.0]) == "▅▅"


def test_the_live_view_starts_warns_stops_and_leaves_no_thread():
    out, err = Stream(terminal=True), Stream()
    view = live_view(out=out, err=err)
    view.start(graph(), 10, Path("runs/a"), first_step=4)
    view.step(RECORD)
    view.warn("mesh 'score' is slow")
    view.stop(SUMMARY)
    view.stop(SUMMARY)
    assert "warning: mesh 'score' is slow" in out.getvalue()
    assert "step 5/10" in out.getvalue()
    assert err.getvalue().count("500 consumed") == 1
    assert not view._drawer.is_alive()


def test_the_live_view_draws_at_most_four_times_a_second_however_often_it_is_told():
    out = Stream(terminal=True)
    view = live_view(out=out)
    view.start(graph(), 10_000, None)
    begun = time.monotonic()
    while time.monotonic() - begun < 0.6:
        view.step(RECORD)
        view.status([EdgeStatus(source="a", target="b", rows=1)], [])
        time.sleep(0.001)
    seconds = time.monotonic() - begun
    drawn = out.getvalue().count("flowrl · grpo")
    view.stop(None)
    assert drawn <= 2 + 4 * seconds


def test_a_terminal_that_goes_away_ends_the_view_and_not_the_run():
    class Gone(Stream):
        gone = False

        def write(self, text):
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    out = Gone(terminal=True)
    view = live_view(out=out)
    view.start(graph(), 10, None)
    out.gone = True
    view.step(RECORD)
    view.warn("unheard")
    view.stop(SUMMARY)


def test_plain_lines_do_without_rich():
    code = (
        "import sys, flowrl.runtime.console as r; r.open_console().step({'step': 1});"
        "assert not {'rich', 'torch', 'networkx'} & set(sys.modules)"
    )
    root = Path(fl.__file__).parent.parent
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("step 1 loss=- reward=- kl=- lag=- tok/s=-\n", "")


def test_a_line_says_each_value_once() -> None:
    line = step_line(RECORD | {"held_out/loss": 0.5, "critic/loss": 0.25})
    assert line.count("held_out/loss=0.500") == line.count("critic/loss=0.250") == 1
