"""Sources, batching by step, and the policies for rows that do not fit."""

from __future__ import annotations

import importlib
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl import sources
from flowrl.data import PromptReader, PromptSettings
from flowrl.epochs import Epochs
from flowrl.errors import DataError
from flowrl.rows import Key
from flowrl.seeds import mix, permuted, row_seed
from flowrl.sources import open_source
from flowrl.tasks import ReverseDigits

BOS = 1


class Characters:
    """One id a character, behind a BOS; chat messages are joined by their template ``role:content;``."""

    eos_ids = frozenset({2})
    num_encoded = 0

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        self.num_encoded += 1
        text = prompt if isinstance(prompt, str) else "".join(f"{turn['role']}:{turn['content']};" for turn in prompt)
        return [BOS, *map(ord, text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token > 2)


def read(source: object, **settings: Any) -> PromptReader:
    return PromptReader(source, Characters(), PromptSettings(**settings))


def rows_of(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text} for text in texts]


def steps(reader: PromptReader, num: int) -> list[list[str]]:
    return [rows["prompt"] for step in range(num) if (rows := reader.read(step)) is not None]


def jsonl(folder: Path, text: str | bytes, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# What read gives


def test_a_step_has_keys_text_ids_and_every_column_with_its_own_types() -> None:
    rows = [{"prompt": "a", "answer": 72, "tags": ["x", {"y": None}]}, {"prompt": "bc", "answer": "72", "tags": []}]
    step = read(rows, batch=2).read(5)
    assert step is not None
    assert step.keys == [Key(5, 0), Key(5, 1)]
    assert step["prompt"] == ["a", "bc"]
    assert [ids.tolist() for ids in step["prompt_ids"]] == [[BOS, 97], [BOS, 98, 99]]
    assert step["prompt_ids"].values.dtype == np.int32
    assert step["answer"] == [72, "72"]
    assert [type(answer) for answer in step["answer"]] == [int, str]
    assert step["tags"] == [["x", {"y": None}], []]
    assert set(read(rows, batch=2).columns) == set(step.columns)


def test_chat_messages_go_through_the_template_and_their_text_is_the_decoded_ids() -> None:
    messages = [{"role": "user", "content": "hi"}]
    for row in ({"messages": messages}, {"prompt": messages}):
        step = read([row], batch=1).read(0)
        assert step is not None
        assert step["prompt"] == ["user:hi;"]
        assert step["prompt_ids"][0].tolist() == Characters().encode(messages)


def test_a_column_of_ids_is_taken_as_it_is() -> None:
    tokenizer = Characters()
    step = PromptReader([{"prompt_ids": [BOS, 97, 98]}], tokenizer, PromptSettings(batch=1)).read(0)
    assert step is not None
    assert step["prompt_ids"][0].tolist() == [BOS, 97, 98]
    assert step["prompt"] == ["ab"]
    assert tokenizer.num_encoded == 0
    with pytest.raises(DataError, match=r"row 0 of the list: column 'prompt_ids' holds no token ids"):
        read([{"prompt_ids": ["a"]}], batch=1).read(0)


def test_another_column_can_hold_the_prompt() -> None:
    step = read([{"question": "q", "answer": 1}], batch=1, column="question", required=("prompt", "prompt_ids")).read(0)
    assert step is not None
    assert (step["prompt"], step["question"]) == (["q"], ["q"])
    with pytest.raises(DataError, match="becomes the column 'prompt', but the source has one already"):
        read([{"question": "q", "prompt": "p"}], batch=1, column="question")


def test_a_source_without_the_wanted_columns_is_refused_with_those_it_has() -> None:
    with pytest.raises(DataError, match=r"the list has no column 'prompt'\n  found:  question, answer"):
        read([{"question": "q", "answer": 1}], batch=1)
    with pytest.raises(DataError, match=r"no column 'anwser'(.|\n)*did you mean 'answer'\?"):
        read([{"prompt": "q", "answer": 1}], batch=1, required=("anwser",))


@pytest.mark.parametrize("value", [5, ["text"], [], {"role": "user"}])
def test_a_prompt_that_is_neither_text_nor_chat_is_refused_by_row(value: object) -> None:
    with pytest.raises(DataError, match="row 1 of the list: column 'prompt' is no prompt"):
        read([{"prompt": "a"}, {"prompt": value}], batch=2).read(0)


def test_a_tokenizer_that_fails_names_the_row() -> None:
    class Failing(Characters):
        def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
            raise ValueError("no such character")

    with pytest.raises(DataError, match="row 0 of the list: the prompt cannot be tokenized: ValueError: no such char"):
        PromptReader(rows_of("a"), Failing(), PromptSettings(batch=1)).read(0)


def test_reading_a_step_is_a_function_of_the_step_alone() -> None:
    forward = read(rows_of(*"abcdefghij"), batch=4, shuffle=True, seed=3)
    backward = read(rows_of(*"abcdefghij"), batch=4, shuffle=True, seed=3)
    assert steps(forward, 12) == [backward.read(step)["prompt"] for step in reversed(range(12))][::-1]  # type: ignore[index]
    assert steps(forward, 12) != steps(read(rows_of(*"abcdefghij"), batch=4, shuffle=True, seed=4), 12)


def test_equal_rows_stay_apart_by_their_keys() -> None:
    step = read(rows_of("a", "a"), batch=2).read(0)
    assert step is not None
    assert step["prompt"] == ["a", "a"]
    assert len(set(step.keys)) == 2


# The end of an epoch


def test_too_few_rows_for_a_batch_is_an_error_with_counts() -> None:
    with pytest.raises(DataError, match="the list: 3 usable of 3 rows, batch needs 8"):
        read(rows_of(*"abc"), batch=8)


def test_too_few_usable_rows_tells_why_the_others_were_dropped() -> None:
    rows = [{"prompt": "long" * 9, "answer": 1}] * 7 + [{"prompt": "a", "answer": None}] * 2
    rows += [{"prompt": "a", "answer": 1}] * 3
    expected = r"3 usable of 12 rows \(9 dropped: 7 too long, 2 without 'answer'\), batch needs 8"
    with pytest.raises(DataError, match=expected):
        read(rows, batch=8, required=("answer",), max_prompt_tokens=8, on_too_long="drop", on_missing="drop")


def test_drop_leaves_the_last_rows_out_and_says_so() -> None:
    reader = read(rows_of(*"abcdefghij"), batch=4, epochs=2)
    assert steps(reader, 9) == [list("abcd"), list("efgh")] * 2
    assert reader.num_steps == 4
    assert reader.num_dropped_last == 2
    assert reader.report() == "10 rows, batch 4: 2 rows dropped at the end of each epoch"
    assert reader.read(4) is None


def test_short_makes_a_smaller_last_batch() -> None:
    reader = read(rows_of(*"abcdefghij"), batch=4, last="short", epochs=1)
    assert steps(reader, 9) == [list("abcd"), list("efgh"), list("ij")]
    assert reader.num_steps == 3
    assert reader.num_dropped_last == 0
    assert reader.report() == "10 rows, batch 4: the last batch of each epoch has 2 rows"
    assert steps(read(rows_of(*"abc"), batch=8, last="short", epochs=1), 3) == [list("abc")]


def test_wrap_fills_the_last_batch_from_the_next_epoch_which_goes_on_behind() -> None:
    reader = read(rows_of(*"abcdefghij"), batch=4, last="wrap", epochs=1)
    assert steps(reader, 9) == [list("abcd"), list("efgh"), list("ijab")]
    endless = read(rows_of(*"abcdefghij"), batch=4, last="wrap")
    assert "".join("".join(texts) for texts in steps(endless, 5)) == "abcdefghij" * 2
    assert endless.num_steps is None
    assert "filled with the first rows of the next" in endless.report()


def test_each_epoch_of_a_shuffled_source_holds_every_row_once_in_another_order() -> None:
    halves = steps(read(rows_of(*"abcdefgh"), batch=4, shuffle=True), 200)
    epochs = ["".join(first + second) for first, second in zip(halves[::2], halves[1::2], strict=True)]
    assert {"".join(sorted(epoch)) for epoch in epochs} == {"abcdefgh"}
    assert len(set(epochs)) > 95


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "at least one row"),
        ({"batch": 1, "last": "keep"}, "unknown policy 'last'\n  found:  'keep'\n  wanted: drop, short, wrap"),
        ({"batch": 1, "epochs": 0}, "read at least once"),
        ({"batch": 1, "on_too_long": "right"}, "unknown on_too_long"),
        ({"batch": 1, "on_missing": "zero"}, "unknown on_missing"),
        ({"batch": 1, "max_prompt_tokens": 0}, "at least one token"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(rows_of("a"), **settings)


# Rows that do not fit


def test_a_prompt_that_is_too_long_is_refused_with_row_and_lengths_before_any_step() -> None:
    with pytest.raises(DataError, match="row 1 of the list: the prompt is too long: 12 > 8 tokens"):
        read(rows_of("a", "bcdefghijkl"), batch=1, max_prompt_tokens=8)


def test_a_prompt_that_is_too_long_can_be_dropped_with_a_count() -> None:
    reader = read(rows_of("a", "bcdefghijkl", "c"), batch=1, max_prompt_tokens=8, on_too_long="drop", epochs=1)
    assert steps(reader, 3) == [["a"], ["c"]]
    assert reader.dropped == {"too long": 1}
    assert reader.report() == "2 usable of 3 rows (1 dropped: 1 too long), batch 1: 2 steps an epoch"


def test_left_keeps_exactly_the_last_ids() -> None:
    ids = list(range(101, 113))
    step = read([{"prompt_ids": ids}], batch=1, max_prompt_tokens=8, on_too_long="left").read(0)
    assert step is not None
    assert step["prompt_ids"][0].tolist() == ids[4:]
    step = read(rows_of("abcdefghijk"), batch=1, max_prompt_tokens=8, on_too_long="left").read(0)
    assert step is not None
    assert step["prompt"] == ["defghijk"]


def test_a_prompt_of_exactly_the_limit_fits() -> None:
    assert steps(read(rows_of("abcdefg"), batch=1, max_prompt_tokens=8), 1) == [["abcdefg"]]


def test_a_missing_answer_is_refused_with_its_row_and_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"prompt": "a", "answer": 72}\n\n{"prompt": "b", "answer": null}\n{"prompt": "c"}\n')
    with pytest.raises(DataError, match=r"train.jsonl:3 \(row 1\) has no value in column 'answer'"):
        read(path, batch=1, required=("answer",))
    reader = read(path, batch=1, required=("answer",), on_missing="drop", epochs=1)
    assert steps(reader, 9) == [["a"]]
    assert reader.dropped == {"without 'answer'": 2}


def test_columns_that_the_graph_does_not_read_may_be_missing(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"prompt": "a"}\n{"prompt": "b", "hint": 1}\n')
    step = read(path, batch=2).read(0)
    assert step is not None
    assert step["hint"] == [None, 1]


def test_a_missing_prompt_is_refused_or_dropped() -> None:
    rows = [{"prompt": None}, {"prompt": "a"}]
    with pytest.raises(DataError, match="row 0 of the list has no value in column 'prompt'"):
        read(rows, batch=1).read(0)
    assert steps(read(rows, batch=1, on_missing="drop", epochs=1), 2) == [["a"]]


def test_zero_and_empty_text_are_values() -> None:
    values: tuple[Any, ...] = (0, "", False, [])
    rows = [{"prompt": "a", "answer": value} for value in values]
    step = read(rows, batch=4, required=("answer",)).read(0)
    assert step is not None
    assert step["answer"] == [0, "", False, []]


def test_prompts_are_not_tokenized_at_opening_unless_a_limit_asks_for_it() -> None:
    for settings, num_encoded in (({}, 0), ({"on_too_long": "left"}, 0), ({"on_too_long": "drop"}, 3)):
        tokenizer = Characters()
        limit = 8 if settings else None
        PromptReader(rows_of(*"abc"), tokenizer, PromptSettings(batch=1, max_prompt_tokens=limit, **settings))  # type: ignore[arg-type]
        assert tokenizer.num_encoded == num_encoded


# Sources


def test_unbounded_sources_are_read_in_their_own_order_and_cannot_drop() -> None:
    for source in (lambda i: {"prompt": str(i)}, ReverseDigits()):
        reader = read(source, batch=3, shuffle=True)
        assert reader.num_steps is None
        assert reader.report() == "batch 3: unbounded, read in its own order"
        step = reader.read(7)
        assert step is not None
        assert step["prompt"] == [open_source(source)[row]["prompt"] for row in (21, 22, 23)]
        with pytest.raises(DataError, match="is unbounded: no row can be dropped"):
            read(source, batch=3, max_prompt_tokens=8, on_too_long="drop")
        with pytest.raises(DataError, match="an unbounded source has no epochs"):
            read(source, batch=3, epochs=2)


def test_an_unbounded_source_is_checked_row_by_row() -> None:
    reader = read(
        lambda i: {"prompt": "x" * i, "answer": i or None}, batch=2, required=("answer",), max_prompt_tokens=4
    )
    with pytest.raises(DataError, match=r"row 0 of function .* has no value in column 'answer'"):
        reader.read(0)
    assert reader.read(1) is not None
    with pytest.raises(DataError, match=r"row 4 of function .*: the prompt is too long: 5 > 4"):
        reader.read(2)


def test_a_builtin_task_is_a_source() -> None:
    assert open_source("builtin:reverse_digits")[3] == ReverseDigits()[3]
    assert open_source("builtin:reverse_digits", seed=7)[3] == ReverseDigits(seed=7)[3] != ReverseDigits()[3]
    with pytest.raises(DataError, match=r"no task is called 'builtin:revers_digits'(.|\n)*'reverse_digits'\?"):
        open_source("builtin:revers_digits")


def test_an_object_with_length_and_items_is_read_when_needed() -> None:
    class Squares:
        asked: list[int]

        def __init__(self) -> None:
            self.asked = []

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, row: int) -> dict[str, Any]:
            self.asked.append(row)
            return {"prompt": str(row * row)}

    squares = Squares()
    source = open_source(squares)
    assert (source.num_rows, source.columns) == (1000, ("prompt",))
    assert source[30] == {"prompt": "900"}
    assert squares.asked == [0, 30]
    with pytest.raises(IndexError):
        source[1000]


def test_an_iterable_is_read_once_and_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(num: int) -> Iterator[dict[str, Any]]:
        return ({"prompt": str(i)} for i in range(num))

    source = open_source(generate(3))
    assert [source[i]["prompt"] for i in (2, 0, 2)] == ["2", "0", "2"]
    monkeypatch.setattr(sources, "MAX_ITERABLE_ROWS", 3)
    assert open_source(generate(3)).num_rows == 3
    with pytest.raises(
        DataError, match=r"the generator gave more than 3 rows, and an iterable is read into memory once"
    ):
        open_source(generate(4))


def test_a_hugging_face_stream_is_iterated_though_it_can_be_indexed_by_column() -> None:
    class Streamed:
        """As `datasets.IterableDataset`."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([{"prompt": "a"}, {"prompt": "b"}])

        def __getitem__(self, column: str) -> list[Any]:
            return [row[column] for row in self]

    assert open_source(Streamed())[1] == {"prompt": "b"}


def test_a_hugging_face_data_set_is_read_by_its_own_methods() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    source = open_source(data)
    assert (source.num_rows, source.columns) == (2, ("prompt", "answer"))
    assert source[1] == {"prompt": "b", "answer": 2}
    with pytest.raises(DataError, match=r"a DatasetDict is no source of prompts\n  found:  keys 'train'"):
        open_source(datasets.DatasetDict(train=data))


def test_a_row_that_cannot_be_read_or_is_no_dict_is_named() -> None:
    def function(row: int) -> Any:
        return {"prompt": "a"} if row == 0 else 1 // (2 - row)

    source = open_source(function)
    with pytest.raises(
        DataError, match=r"row 1 of function .*function is no object with named columns\n  found:  int: 1"
    ):
        source[1]
    with pytest.raises(DataError, match=r"row 2 of function .* cannot be read: ZeroDivisionError"):
        source[2]
    with pytest.raises(DataError, match="row 1 of the list is no object with named columns"):
        open_source([{"prompt": "a"}, "b"])
    with pytest.raises(DataError, match="row 0 of the list: a column's name must be text"):
        open_source([{1: "a"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "the list has no rows"),
        ({"train": []}, "a dict is no source of prompts"),
        (ReverseDigits, r"ReverseDigits is a class, not a source\n  fix:    give an instance: ReverseDigits\(\)"),
        (b"train.jsonl", "bytes are no source"),
        (5, "the int is no source of prompts"),
    ],
)
def test_what_is_no_source_is_refused(source: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(source)


# Files


def test_a_jsonl_file_keeps_unicode_crlf_blank_lines_and_nested_values(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "Grüße, 世界 \u2028 🎉"}\r\n\r\n{"prompt": "b", "nested": {"a": [1, 2.5, null, true]}}'
    source = open_source(jsonl(tmp_path, text))
    assert source.num_rows == 2
    assert source.columns == ("prompt", "nested")
    assert source[0] == {"prompt": "Grüße, 世界 \u2028 🎉"}
    assert source[1]["nested"] == {"a": [1, 2.5, None, True]}
    assert source.place(1).endswith("train.jsonl:3 (row 1)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": "a"}\n{"prompt": \n',
            r"train.jsonl:2: not JSON at column 11: Expecting value\n  found:  {\"prompt\":",
        ),
        (
            '{"prompt": "a"}\n["a"]\n',
            r"train.jsonl:2 \(row 1\) is no object with named columns\n  found:  list: \['a'\]",
        ),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "train.jsonl:2: not UTF-8 text at byte 12"),
        ("", r"train.jsonl has no rows\n  found:  an empty file"),
        ("\n\n", "train.jsonl has no rows"),
    ],
)
def test_a_damaged_jsonl_file_is_refused_by_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(str(jsonl(tmp_path, text)))


def test_a_json_file_holds_a_list_of_objects(tmp_path: Path) -> None:
    assert open_source(jsonl(tmp_path, '[{"prompt": "a"}]', "a.json"))[0] == {"prompt": "a"}
    with pytest.raises(DataError, match=r"holds no list of rows\n  found:  dict"):
        open_source(jsonl(tmp_path, '{"prompt": "a"}', "a.json"))
    with pytest.raises(DataError, match=r"a.json:2: not JSON: Extra data\n  fix:    one object a line is .jsonl"):
        open_source(jsonl(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}', "a.json"))


def test_a_parquet_file_keeps_types(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = [{"prompt": "a", "answer": 72, "turns": [{"role": "user"}]}, {"prompt": "b", "answer": None, "turns": []}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert (source.num_rows, source.columns) == (2, ("prompt", "answer", "turns"))
    assert [source[0], source[1]] == rows
    with pytest.raises(DataError, match=r"b.parquet cannot be read as parquet"):
        open_source(jsonl(tmp_path, "no parquet", "b.parquet"))


def test_a_parquet_file_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(DataError, match=r"needs the pyarrow package\n  fix:    pip install 'flowrl\[data\]'"):
        open_source(jsonl(tmp_path, "x", "a.parquet"))


def test_a_missing_file_names_its_path_and_near_names(tmp_path: Path) -> None:
    jsonl(tmp_path, "{}")
    with pytest.raises(DataError, match=r"no file .*/trian.jsonl\n  fix:    did you mean 'train.jsonl'\?"):
        open_source(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"there is no folder .*/nowhere$"):
        open_source(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(DataError, match=r"is a folder, not a file of prompts"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=r"unknown kind of file\n  found:  .txt\n  wanted: .jsonl, .json, .parquet"):
        open_source(jsonl(tmp_path, "x", "a.txt"))
    with pytest.raises(DataError, match="Hugging Face hub"):
        open_source("no-such-owner/no-such-data")


# Seeds and orders


def test_a_row_seed_is_a_fixed_function_of_run_seed_and_key() -> None:
    assert row_seed(0, Key(0, 0, 0)) == 2391539541053276776
    seeds = {row_seed(run, Key(*key)) for run in (0, 1, -1) for key in np.ndindex(8, 8, 8)}
    assert len(seeds) == 3 * 512
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert row_seed(3, Key(1, 2)) != row_seed(3, Key(2, 1))


def test_every_bit_of_a_row_seed_is_set_half_of_the_time() -> None:
    seeds = [row_seed(7, Key(step, 0, sample)) for step in range(40) for sample in range(50)]
    shares = [sum(seed >> bit & 1 for seed in seeds) / len(seeds) for bit in range(64)]
    assert 0.44 < min(shares) < max(shares) < 0.56


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 17, 255, 256, 257, 1000])
def test_a_shuffled_pass_holds_every_row_once(num_rows: int) -> None:
    assert sorted(permuted(i, num_rows, seed=5) for i in range(num_rows)) == list(range(num_rows))


def test_all_orders_of_a_few_rows_are_about_equally_frequent() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(600):
        order = tuple(permuted(i, 4, mix(0, epoch)) for i in range(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert 8 < min(counts.values()) < max(counts.values()) < 50  # 25 expected, standard deviation 5


def test_a_huge_source_is_shuffled_without_a_table() -> None:
    epochs = Epochs(num_rows=10**12, batch=8, shuffle=True)
    rows = [row for step in range(100) for row in epochs.rows(step) or []]
    assert len(set(rows)) == 800
    assert 4e11 < sum(rows) / len(rows) < 6e11


def test_a_reader_of_a_file_survives_pickling(tmp_path: Path) -> None:
    source = open_source(jsonl(tmp_path, '{"prompt": "a"}\n'))
    assert pickle.loads(pickle.dumps(source))[0] == {"prompt": "a"}


# One begin token, whichever way the prompt comes


def test_messages_templated_text_and_ids_give_the_same_ids_with_one_begin_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("flowrl.backends.hf_tokenizer")
    folder = tmp_path / "model"
    shutil.copytree(str(files("flowrl.graphs") / "warm_start" / "reverse_digits"), folder)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}>"  # writes the begin token itself
    (folder / "chat_template.jinja").write_text(template)
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": "123"}]},
        {"prompt": "^123>"},
        {"prompt": "123>"},
        {"prompt_ids": [BOS, 4, 5, 6, 45]},
    ]
    asked = PromptReader([{"prompt": "123"}], tokenizers.HFTokenizer(folder), PromptSettings(batch=1, chat=True))
    [said] = asked.read(0)["prompt_ids"]  # type: ignore[index]
    assert said.tolist() == [BOS, 4, 5, 6, 45]
    step = PromptReader(rows, tokenizers.HFTokenizer(folder), PromptSettings(batch=4)).read(0)
    assert step is not None
    assert [ids.tolist() for ids in step["prompt_ids"]] == [[BOS, 4, 5, 6, 45]] * 4
    assert step["prompt"] == ["123>", "^123>", "123>", "123>"]


@pytest.mark.parametrize("column", ["prompt_messages", "prompt_row"])
def test_a_column_that_the_reader_writes_is_not_overwritten(column: str) -> None:
    rows = [{"prompt": "a", column: "kept"}]
    with pytest.raises(DataError, match=f"has a column '{column}', which flowrl writes itself"):
        read(rows, batch=1)
