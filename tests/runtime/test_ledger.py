"""The ledger: every row is issued, then produced, then consumed or dropped, each once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import LedgerError
from flowrl.rows import Key
from flowrl.runtime.ledger import Ledger, State, most_frequent


def keys(step: int = 0, prompts: int = 2, n: int = 2) -> list[Key]:
    return [Key(step, prompt, sample) for prompt in range(prompts) for sample in range(n)]


def test_a_row_goes_from_issued_to_consumed_and_then_into_the_totals():
    ledger = Ledger(staleness=0)
    [row] = keys(prompts=1, n=1)
    assert ledger.state(row) is None
    ledger.issue(0, [row], 0)
    assert ledger.state(row) is State.ISSUED
    assert ledger.produce(0, [row]) == {row}
    assert ledger.state(row) is State.PRODUCED
    assert ledger.consume(0, {row}, 0) == {0: 1}
    assert ledger.state(row) is State.CONSUMED
    assert len(ledger) == 1
    ledger.close(0)
    assert ledger.state(row) is None
    assert len(ledger) == 0
    totals = ledger.totals()
    assert (totals.issued, totals.produced, totals.consumed, totals.open) == (1, 1, 1, 0)
    assert totals.balanced


def test_a_row_is_issued_once():
    ledger = Ledger(staleness=0)
    ledger.issue(0, keys(), 0)
    ledger.produce(0, keys())
    with pytest.raises(LedgerError, match="step 1 prompt 1 sample 0 is issued twice"):
        ledger.issue(0, [Key(0, 1, 0)], 0)
    with pytest.raises(LedgerError, match="is issued twice"):
        ledger.issue(1, [Key(1, 0, 0), Key(1, 0, 0)], 0)


def test_a_second_answer_brings_nothing():
    ledger = Ledger(staleness=0)
    ledger.issue(0, keys(), 0)
    assert ledger.produce(0, keys()[:3]) == set(keys()[:3])
    assert ledger.produce(0, keys()) == set(keys()[3:])
    assert ledger.produce(7, keys(7)) == set(), "nor does one of a step that is closed"
    assert ledger.totals().produced == 4


def test_a_row_that_does_not_exist_is_not_consumed():
    ledger = Ledger(staleness=0)
    ledger.issue(0, keys(), 0)
    with pytest.raises(LedgerError, match="step 1 prompt 0 sample 0 cannot be consumed: it is issued"):
        ledger.consume(0, set(keys()), 0)
    with pytest.raises(LedgerError, match="step 10 prompt 0 sample 0 cannot be consumed: it is unknown"):
        ledger.consume(9, set(keys(9)), 0)


def test_a_row_is_not_consumed_and_dropped():
    ledger = Ledger(staleness=0)
    ledger.issue(0, keys(), 0)
    ledger.produce(0, keys())
    ledger.drop(0, {Key(0, 0, 0)}, "too long")
    with pytest.raises(LedgerError, match="cannot be consumed: it is dropped"):
        ledger.consume(0, {Key(0, 0, 0)}, 0)
    ledger.consume(0, {Key(0, 0, 1)}, 0)
    with pytest.raises(LedgerError, match="cannot be dropped: it is consumed"):
        ledger.drop(0, {Key(0, 0, 1)}, "too long")


def test_a_row_may_be_dropped_before_it_exists():
    ledger = Ledger(staleness=0)
    ledger.issue(0, keys(), 0)
    ledger.produce(0, keys()[:2])
    ledger.drop(0, set(keys()), "its worker is gone")
    ledger.close(0)
    assert ledger.totals().dropped == {"its worker is gone": 4}
    assert ledger.totals().balanced


def test_reasons_that_quote_their_row_are_summed_up():
    ledger = Ledger(staleness=0)
    many = [Key(0, 0, sample) for sample in range(200)]
    ledger.issue(0, many, 0)
    for key in many:
        ledger.drop(0, {key}, "too long" if key.sample < 100 else f"cannot read {key.sample}")
    dropped = ledger.totals().dropped
    assert len(dropped) == 65
    assert sum(dropped.values()) == 200
    assert most_frequent(dropped) == [
        ("too long", 100),
        ("cannot read 100", 1),
        ("cannot read 101", 1),
        ("other reasons", 98),
    ]


def test_a_step_with_open_rows_is_not_closed():
    ledger = Ledger(staleness=0)
    ledger.issue(3, keys(3), 3)
    with pytest.raises(LedgerError, match="step 4 is closed with 4 open rows, the first step 4 prompt 0 sample 0"):
        ledger.close(3)


def test_a_prompt_is_admitted_up_to_the_staleness():
    assert [Ledger(2).admits(step, 5) for step in (6, 7, 8)] == [True, True, False]


def test_a_row_that_is_too_old_is_not_consumed():
    ledger = Ledger(staleness=1)
    ledger.issue(5, keys(5), 3)
    ledger.produce(5, keys(5))
    with pytest.raises(LedgerError, match="a row of step 6 is consumed with lag 2; the staleness is 1"):
        ledger.consume(5, set(keys(5)), 5)


def test_rows_that_are_sampled_again_count_from_their_new_version():
    ledger = Ledger(staleness=3)
    ledger.issue(5, keys(5), 2)
    ledger.produce(5, keys(5)[:1])
    assert ledger.reissue(5, keys(5), 4) == set(keys(5)[1:])
    ledger.produce(5, keys(5))
    assert ledger.consume(5, set(keys(5)), 5) == {3: 1, 1: 3}
    assert ledger.totals().max_lag == 3


rows = st.sets(st.sampled_from(keys()))
verb = st.sampled_from(["produce", "consume", "drop"])


@given(st.lists(st.tuples(verb, rows), max_size=12))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_the_ledger_agrees_with_one_dict_of_states_and_always_balances(verbs):
    ledger = Ledger(staleness=0)
    ledger.issue(0, keys(), 0)
    model = dict.fromkeys(keys(), State.ISSUED)
    for verb, rows in verbs:
        if verb == "produce":
            fresh = {key for key in rows if model[key] is State.ISSUED}
            assert ledger.produce(0, rows) == fresh
            model.update(dict.fromkeys(fresh, State.PRODUCED))
        else:
            after, before = (
                (State.CONSUMED, {State.PRODUCED})
                if verb == "consume"
                else (State.DROPPED, {State.ISSUED, State.PRODUCED})
            )
            if any(model[key] not in before for key in rows):
                continue  # raises, as the tests above say
            ledger.consume(0, rows, 0) if verb == "consume" else ledger.drop(0, rows, "why")
            model.update(dict.fromkeys(rows, after))
        assert {key: ledger.state(key) for key in keys()} == model
        assert ledger.totals().balanced
    assert ledger.open_rows(0) == {key for key, state in model.items() if state in (State.ISSUED, State.PRODUCED)}
