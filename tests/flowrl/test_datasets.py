"""Data sets of answers in every layout, as the columns that `fl.responses` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl import datasets
from flowrl.dialogues import from_transcript, shared_text, to_transcript
from flowrl.errors import DataError
from flowrl.sources import Source
from flowrl.tasks import ReverseDigits, ReverseDigitsPairs

DATA = Path(__file__).parent.parent / "data" / "preferences"
ASK, GOOD, BAD = (
    {"role": role, "content": text} for role, text in [("user", "q"), ("assistant", "g"), ("assistant", "b")]
)
SYSTEM = {"role": "system", "content": "s"}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


def all_rows(source: Source) -> list[dict[str, Any]]:
    assert source.num_rows is not None
    return [source[row] for row in range(source.num_rows)]


# --- pairs


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "q", "chosen": "g", "rejected": "b"}, "q", "g", "b"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK], [GOOD], [BAD]),
        ({"prompt": [ASK], "chosen": "g", "rejected": "b"}, [ASK], "g", "b"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": BAD}, [ASK], [GOOD], [BAD]),
        ({"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK], [GOOD], [BAD]),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK], [GOOD], [BAD]),
        ({"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, GOOD, ASK, GOOD]}, [ASK, GOOD, ASK], [GOOD], [GOOD]),
        ({"conversations": [human("q")], "chosen": gpt("g"), "rejected": gpt("b")}, [ASK], [GOOD], [BAD]),
        (
            {"conversations": [human("q")], "system": "s", "chosen": gpt("g"), "rejected": gpt("b")},
            [SYSTEM, ASK], [GOOD], [BAD],
        ),
        ({"instruction": "q", "input": "", "chosen": "g", "rejected": "b"}, "q", "g", "b"),
        ({"instruction": "q", "input": "i", "chosen": "g", "rejected": "b"}, "q\ni", "g", "b"),
        ({"prompt": "q", "system": "s", "chosen": "g", "rejected": "b"}, [SYSTEM, ASK], "g", "b"),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: g", "rejected": "\n\nHuman: q\n\nAssistant: b"},
            [ASK], [GOOD], [BAD],
        ),
        ({"chosen": "the sky is blue", "rejected": "the sky is bluish"}, "the sky is", " blue", " bluish"),
    ],
)  # fmt: skip
def test_pairs_of_every_layout_have_a_prompt_and_two_answers(row: Any, prompt: Any, chosen: Any, rejected: Any) -> None:
    source = datasets.pairs([{**row, "id": 7}])
    assert source[0] == {"prompt": prompt, "chosen": chosen, "rejected": rejected, "id": 7}
    assert source.columns == ("prompt", "chosen", "rejected", "id")


def test_the_shipped_pairs_are_read_with_their_files_name_and_row() -> None:
    source = datasets.pairs(DATA / "dpo_en_demo.json")
    rows = all_rows(source)
    assert len(rows) == 50
    assert {turn["role"] for row in rows for turn in row["prompt"]} <= {"system", "user", "assistant"}
    assert all(row["prompt"][-1]["role"] == "user" for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert source.place(3) == f"row 3 of {DATA / 'dpo_en_demo.json'}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "chosen": "g"},
            r"(?s)a row has no column 'rejected'.*columns prompt, chosen.*flowrl.datasets",
        ),
        ({"prompt": "q", "chosen": "g", "rejected": None}, "a row has no column 'rejected'"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt in common"),
        ({"chosen": "yes", "rejected": "no"}, "two texts are no prompt in common and an answer each"),
        ({"chosen": "ask yes", "rejected": "ask yes"}, "two texts are no prompt in common and an answer each"),
        ({"chosen": "ask", "rejected": "ask yes"}, "two texts are no prompt in common and an answer each"),
        ({"chosen": [ASK, GOOD], "rejected": [SYSTEM, BAD]}, "no prompt in common"),
        ({"prompt": "q", "chosen": "g", "rejected": [BAD]}, "one answer is text and the other is not"),
        ({"prompt": "q", "chosen": [{"from": "gtp", "value": "g"}], "rejected": "b"}, r"(?s)gtp.*did you mean 'gpt'"),
        ({"prompt": "q", "chosen": [{"text": "g"}], "rejected": [BAD]}, "a turn of a conversation is no message"),
        ({"prompt": "q", "chosen": 7, "rejected": 8}, "a conversation is no list of messages"),
    ],
)
def test_a_row_of_no_known_layout_is_refused_with_its_line(row: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"prompt": "q", "chosen": "g", "rejected": "b"}}\n\n{json.dumps(row)}\n')
    source = datasets.pairs(path)
    assert source[0] == {"prompt": "q", "chosen": "g", "rejected": "b"}
    with pytest.raises(DataError, match=message) as caught:
        source[1]
    assert caught.value.problem.startswith(f"{path}:3 (row 1): ")
    with pytest.raises(DataError, match=message):  # the first row is looked at when the file is opened
        datasets.pairs([row])


# --- answers


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "q", "answer": "g"}, "q", "g"),
        ({"prompt": "q", "completion": "g"}, "q", "g"),
        ({"prompt": [ASK], "completion": [GOOD]}, [ASK], [GOOD]),
        ({"instruction": "q", "input": "i", "output": "g"}, "q\ni", "g"),
        ({"messages": [SYSTEM, ASK, GOOD]}, [SYSTEM, ASK], [GOOD]),
        ({"conversations": [human("q"), gpt("g")]}, [ASK], [GOOD]),
        ({"messages": [ASK, BAD, ASK, GOOD]}, [ASK, BAD, ASK], [GOOD]),
        ({"prompt": "q", "chosen": "g", "rejected": "b"}, "q", "g"),
    ],
)
def test_answers_of_every_layout_have_a_prompt_and_an_answer(row: Any, prompt: Any, answer: Any) -> None:
    assert datasets.answers([row])[0] == {"prompt": prompt, "answer": answer}


def test_all_turns_of_a_conversation_can_be_the_answer() -> None:
    rows = [{"messages": [SYSTEM, ASK, BAD, ASK, GOOD]}]
    assert datasets.answers(rows, turns="all")[0] == {"prompt": [SYSTEM, ASK], "answer": [BAD, ASK, GOOD]}


@pytest.mark.parametrize("messages", [[ASK], [ASK, GOOD, ASK], [GOOD]])
def test_a_conversation_without_an_answer_is_refused(messages: Any) -> None:
    with pytest.raises(DataError, match="row 0 of the list: a conversation does not end with an answer"):
        datasets.answers([{"messages": messages}])


# --- labels


def test_a_labelled_answer_brings_one_that_belongs_to_another_prompt() -> None:
    rows = all_rows(datasets.labelled(DATA / "kto_en_demo.json"))
    assert sum(row["label"] for row in rows) == 25
    answers = {json.dumps(row["prompt"]): row["answer"] for row in rows}
    for row in rows:
        assert row["mismatched"] in answers.values()
        assert row["mismatched"] != answers[json.dumps(row["prompt"])]


def test_a_pair_is_two_labelled_answers_and_neither_is_mismatched_with_the_other() -> None:
    rows = [{"prompt": p, "chosen": f"{p}+", "rejected": f"{p}-"} for p in "abc"]
    source = datasets.labelled(rows)
    assert [(row["prompt"], row["answer"], row["label"], row["mismatched"]) for row in all_rows(source)] == [
        ("a", "a+", True, "b+"), ("a", "a-", False, "b+"),
        ("b", "b+", True, "c+"), ("b", "b-", False, "c+"),
        ("c", "c+", True, "a+"), ("c", "c-", False, "a+"),
    ]  # fmt: skip
    assert source.place(3) == "row 1 of the list"


@pytest.mark.parametrize("label", [None, 1, "good"])
def test_an_answer_without_a_label_is_refused(label: object) -> None:
    with pytest.raises(DataError, match=r"(?s)row 0 of the list: an answer has no label.*true or false"):
        datasets.labelled([{"prompt": "a", "completion": "b", "label": label}] * 2)


def test_answers_to_one_prompt_alone_have_nothing_to_be_mismatched_with() -> None:
    with pytest.raises(DataError, match="every row has the same prompt"):
        datasets.labelled([{"prompt": "a", "completion": c, "label": True} for c in "bc"])


# --- parts of data sets


def test_a_split_is_of_all_rows_each_once_and_the_same_every_time(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(20)))
    train, held = datasets.split(path, held_out=5)
    numbers = [[int(row["prompt"]) for row in all_rows(part)] for part in (train, held)]
    assert sorted(numbers[0] + numbers[1]) == list(range(20))
    assert len(numbers[1]) == 5
    again = datasets.split(path, held_out=5)[1]
    assert [int(row["prompt"]) for row in all_rows(again)] == numbers[1]
    assert held.place(0) == f"{path}:{numbers[1][0] + 1} (row {numbers[1][0]})"


def test_a_source_without_end_holds_its_first_rows_out() -> None:
    train, held = datasets.split(ReverseDigits(), held_out=3)
    assert all_rows(held) == [ReverseDigits()[row] for row in range(3)]
    assert train[0] == ReverseDigits()[3]
    assert train.num_rows is None


@pytest.mark.parametrize("held_out", [0, 4, 9, 1.5, True])
def test_a_split_that_leaves_one_side_empty_is_refused(held_out: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)cannot be split.*4 rows"):
        datasets.split([{"prompt": "a"}] * 4, held_out=held_out)


def test_conversations_become_transcripts_for_a_model_without_a_chat_template() -> None:
    [row] = all_rows(datasets.as_text(datasets.pairs([{"prompt": [SYSTEM, ASK], "chosen": [GOOD], "rejected": [BAD]}])))
    assert row == {"prompt": "\n\nSystem: s\n\nHuman: q\n\nAssistant:", "chosen": " g", "rejected": " b"}
    assert from_transcript(to_transcript([ASK]) + " g") == [ASK, GOOD]
    with pytest.raises(DataError, match="an answer of several turns is no text"):
        datasets.as_text([{"prompt": [ASK], "answer": [GOOD, ASK, BAD]}])


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("a b c", "a b d", "a b"),
        ("a bc", "a bd", "a"),
        ("a b", "a b c", "a b"),
        ("a bc d", "a b", "a"),
        ("x", "y", ""),
        ("ab", "ac", ""),
    ],
)
def test_what_two_texts_share_ends_with_a_whole_word(one: str, other: str, shared: str) -> None:
    assert shared_text(one, other) == shared_text(other, one) == shared


def test_a_pair_of_digits_has_one_wrong_digit() -> None:
    task = ReverseDigitsPairs(digits=4, seed=3)
    for number in range(50):
        row = task[number]
        assert row["prompt"] == ReverseDigits(digits=4, seed=3)[number]["prompt"]
        assert row["chosen"] == row["prompt"][:-1][::-1]
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1
    assert len({task[number]["rejected"] for number in range(50)}) > 40
