"""The shipped tasks and their verifiers."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

from flowrl.sources import open_source
from flowrl.tasks import TASKS, Addition, Calculation, CountUp, ReverseDigits, calculator, exact_match, share_correct
from flowrl.tasks.calculation import calculate
from flowrl.tasks.gsm8k import final_number, numeric_match

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_100.jsonl"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_an_unbounded_source_whose_rows_depend_on_seed_and_number_alone(name: str) -> None:
    source = open_source(f"builtin:{name}")
    answers = ("chosen", "rejected") if name.endswith("_pairs") else ("answer",)
    assert (source.num_rows, source.columns) == (None, ("prompt", *answers))
    rows = [source[i] for i in range(100)]
    assert rows == [TASKS[name]()[i] for i in reversed(range(100))][::-1]
    assert rows != [TASKS[name](seed=1)[i] for i in range(100)]
    assert all(tuple(row) == source.columns for row in rows)
    assert source[10**15]["prompt"]


def test_reverse_digits_asks_for_the_number_backwards() -> None:
    rows = [ReverseDigits(digits=5)[i] for i in range(200)]
    assert all(re.fullmatch(r"\d{5}>", row["prompt"]) and row["answer"] == row["prompt"][4::-1] for row in rows)
    assert len({row["prompt"] for row in rows}) > 195
    assert {row["prompt"][0] for row in rows} == set("0123456789")


def test_count_up_asks_for_the_next_digits_with_zero_behind_nine() -> None:
    answers = {row["prompt"]: row["answer"] for row in (CountUp(length=6)[i] for i in range(200))}
    assert len(answers) == 10
    assert (answers["3>"], answers["7>"]) == ("456789", "890123")


def test_addition_asks_for_the_sum_with_leading_zeros() -> None:
    rows = [Addition(digits=2)[i] for i in range(200)]
    for row in rows:
        match = re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"])
        assert match
        assert row["answer"] == f"{int(match[1]) + int(match[2]):03d}"


def test_a_calculation_is_two_operations_of_the_calculator_in_the_right_order() -> None:
    rows, solved = [Calculation()[i] for i in range(300)], []
    for row in rows:
        match = re.fullmatch(r"([1-9]\d)\+([2-9]\d)\*([4-9])>", row["prompt"])
        assert match
        a, b, c = map(int, match.groups())
        assert row["answer"] == str(a + b * c)
        assert 100 <= b * c < a + b * c < 1000
        right = (f"{b * c},", f"{a + b * c},")
        said = tuple(calculator(turn) for turn in calculate(row["prompt"]))
        assert said in ((*right, None), (f"{a + b},", f"{(a + b) * c},", None))
        solved.append(said[:2] == right)
        assert (calculate(row["prompt"])[-1] == row["answer"]) == solved[-1]
    assert 0.4 < sum(solved) / len(solved) < 0.6  # both orders are shown, and which one is a matter of chance
    assert len({row["prompt"] for row in rows}) > 290


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("34*2=", "68,"),
        ("7+5=", "12,"),
        ("9999*9999=", "99980001,"),
        ("10000+1=", "?,"),
        ("12+34*2=", "?,"),
        ("3-1=", "?,"),
        ("80,12+68=", "?,"),
        ("=", "?,"),
        ("80", None),
        ("", None),
        ("34*2", None),
    ],
)
def test_a_pocket_calculator_knows_one_operation_at_a_time(turn: str, said: str | None) -> None:
    assert calculator(turn) == said


def test_exact_match_looks_past_white_space_alone() -> None:
    assert exact_match(" 54321\n", "54321") == 1.0
    assert exact_match("54321", "54321\n") == 1.0
    assert exact_match("543210", "54321") == 0.0
    assert exact_match("", "54321") == 0.0


def test_share_correct_counts_positions_of_the_longer_text() -> None:
    assert share_correct("456789", "456789") == 1.0
    assert share_correct("456", "456789") == 0.5
    assert share_correct("456789456789", "456789") == 0.5
    assert share_correct("956780", "456789") == pytest.approx(4 / 6)
    assert share_correct("", "456789") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 48 + 24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("#### 109,200,000", "109200000"),
        ("#### -47", "-47"),
        ("#### $-1,234.50 or 7", "-1234.5"),
        ("it costs -$3.20", "-3.2"),
        ("the answer is 72.", "72"),
        ("72.0", "72"),
        ("about .5 of it", "0.5"),
        ("10-3", "3"),
        ("(2)-3", "3"),
        ("10 - 3", "3"),
        ("Answers:\n- 72", "72"),
        ("x = -72", "-72"),
        ("\u22125", "-5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("no number", None),
        ("12 apples\n#### none", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_solution(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_numbers_match_by_value() -> None:
    assert numeric_match("so it is $72.00.", "... #### 72") == 1.0
    assert numeric_match("72", 72) == 1.0
    assert numeric_match("0.1", 0.1) == 1.0
    assert numeric_match("1,080", "#### 1080") == 1.0
    assert numeric_match("-72", "72") == 0.0
    assert numeric_match("no idea", "72") == 0.0
    with pytest.raises(ValueError, match="the answer holds no number: 'unknown'"):
        numeric_match("72", "unknown")


def test_every_gsm8k_answer_is_read_as_it_stands_behind_its_mark() -> None:
    source = open_source(GSM8K)
    assert (source.num_rows, source.columns) == (100, ("question", "answer"))
    for i in range(100):
        answer = source[i]["answer"]
        plain = answer.rsplit("#### ", 1)[1].strip().replace(",", "")
        assert final_number(answer) == Decimal(plain)
        assert numeric_match(f"The answer is ${plain}.", answer) == 1.0
        assert numeric_match(f"The answer is {int(plain) + 1}.", answer) == 0.0
