"""The limit in time on a call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import DeadlineError
from flowrl.rows import Key
from flowrl.runtime.timeout import TimeLimit

from .call_cases import declare

KEY = Key(3, 1, 0)
LIMIT_S = 0.05


@fl.reward
def judge_it(response: str) -> float:
    return 0.0


NODE = declare(judge_it)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """The handler of before is back; a timer of before (this test's own limit) goes on."""
    handler, (delay, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    assert signal.getsignal(signal.SIGALRM) == handler
    after, _ = signal.getitimer(signal.ITIMER_REAL)
    assert bool(after) == bool(delay)
    assert after <= delay


def call(function: Callable[[], Any], seconds: float | None = LIMIT_S) -> Any:
    with TimeLimit(NODE, seconds) as limit:
        return limit.call(KEY, lambda _: function(), None)


def sleeps() -> None:
    time.sleep(30)


def spins() -> None:
    while True:
        pass


def swallows_exceptions() -> float:
    while True:
        try:
            time.sleep(30)
        except Exception:
            return 0.0


def swallows_everything() -> float:
    try:
        time.sleep(30)
    except BaseException:
        return 0.0
    return 1.0


def swallows_for_a_while() -> float:
    for _ in range(3):
        try:
            time.sleep(30)
        except:  # noqa: E722
            continue
    return 0.0


@pytest.mark.parametrize("function", [sleeps, spins, swallows_exceptions, swallows_everything, swallows_for_a_while])
def test_a_call_is_interrupted_in_time(function: Callable[[], Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineError) as error:
        call(function)
    assert time.monotonic() - begun < 5
    text = str(error.value)
    assert "function 'judge_it' of node 'judge' took longer than 0.05 s" in text
    assert "found:  no answer after 0.05 s for step 4 prompt 1" in text
    assert "on_error='drop'" in text


def test_a_call_in_time_gives_its_answer() -> None:
    assert call(lambda: 7) == 7
    assert call(lambda: 7, None) == 7


def test_an_exception_of_a_call_goes_through() -> None:
    with pytest.raises(ValueError, match="mine"):
        call(lambda: int("mine"))


def test_each_call_has_the_whole_time() -> None:
    with TimeLimit(NODE, 0.2) as limit:
        for _ in range(4):
            limit.call(KEY, time.sleep, 0.08)


def test_quick_calls_leave_a_later_one_its_limit() -> None:
    with TimeLimit(NODE, 0.1) as limit:
        for _ in range(1000):
            limit.call(KEY, int, 0)
        with pytest.raises(DeadlineError):
            limit.call(KEY, lambda _: spins(), None)
        assert limit.call(KEY, int, 5) == 5


def test_nothing_rings_between_two_calls() -> None:
    with TimeLimit(NODE, 0.02) as limit:
        limit.call(KEY, int, 0)
        time.sleep(0.05)
        assert limit.call(KEY, int, 1) == 1


def test_outside_the_main_thread_a_call_is_judged_when_it_ends() -> None:
    found: list[BaseException] = []

    def run() -> None:
        for seconds in (0.06, 0.0):
            try:
                call(lambda seconds=seconds: time.sleep(seconds))  # type: ignore[misc]
            except DeadlineError as error:
                found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 1


def test_a_timer_of_somebody_else_goes_on() -> None:
    rung: list[int] = []
    handler, timer = signal.signal(signal.SIGALRM, lambda *_: rung.append(1)), signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(DeadlineError):
            call(sleeps)
        assert not rung
        deadline = time.monotonic() + 5
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_limits_nest() -> None:
    def inner() -> None:
        with pytest.raises(DeadlineError):
            call(sleeps, 0.02)
        spins()

    with pytest.raises(DeadlineError, match=r"0.2 s"):
        call(inner, 0.2)


def test_a_function_may_set_an_alarm_of_its_own() -> None:
    def own(seconds: float) -> str:
        def ring(*_: Any) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            time.sleep(30)
        except TimeoutError:
            return "own"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return "never"

    with TimeLimit(NODE, 0.2) as limit:
        assert limit.call(KEY, own, 0.01) == "own"
        with pytest.raises(DeadlineError):  # and the next call has its limit again
            limit.call(KEY, lambda _: spins(), None)
