"""The shipped start models, and the program that made them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.graphs.warm_start import make
from flowrl.tasks import Calculation, ReverseDigits, calculator

SHIPPED = Path(str(files("flowrl.graphs") / "warm_start"))
NAMES = ("reverse_digits", "count_up", "calculation")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def shipped_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((SHIPPED / name / "made_with.json").read_text())
    return record


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_folder_is_a_plain_hugging_face_model(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / name)
    assert sum(weight.numel() for weight in model.parameters()) == 104_000
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = model.config
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (64, 10000.0)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_has_one_token_a_character_and_puts_the_begin_token_in_front(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / name)
    assert tokenizer("12345>")["input_ids"] == [1, 4, 5, 6, 7, 8, 45]
    assert tokenizer("12345>", add_special_tokens=False)["input_ids"] == [4, 5, 6, 7, 8, 45]
    assert tokenizer.decode([7, 3, 45, 49, 4, 2]) == "40>.1$"
    assert tokenizer.decode([7, 3, 2], skip_special_tokens=True) == "40"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    text = make.ALPHABET[3:]
    assert tokenizer(text)["input_ids"] == [1, *range(3, 52)]
    assert tokenizer.decode(list(range(3, 52))) == text
    with pytest.raises(Exception, match="Missing"):  # the tokenizers package raises nothing narrower
        tokenizer("Hello")


def test_the_shipped_folders_are_small() -> None:
    sizes = [file.stat().st_size for name in NAMES for file in (SHIPPED / name).iterdir()]
    assert sum(sizes) < 500_000 * len(NAMES)


def test_the_tuned_model_gets_about_a_quarter_of_its_samples_right() -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "reverse_digits")
    rows = [ReverseDigits(seed=77)[i] for i in range(512)]
    accuracy = make.sampled_accuracy(model, rows, torch.Generator().manual_seed(1))
    assert 0.15 < accuracy < 0.45
    assert shipped_record("reverse_digits")["sampled_accuracy"] >= make.GOOD_ENOUGH


def test_the_model_that_talks_to_a_calculator_gets_about_a_third_right_and_nothing_without_it() -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "calculation")
    rows = [Calculation(seed=77)[i] for i in range(256)]
    accuracy = make.sampled_accuracy(model, rows, torch.Generator().manual_seed(1), calculator)
    assert 0.2 < accuracy < 0.5
    assert make.sampled_accuracy(model, rows, torch.Generator().manual_seed(1), lambda turn: None) < 0.02
    assert shipped_record("calculation")["sampled_accuracy"] >= make.GOOD_ENOUGH


def test_what_the_calculator_says_is_read_and_not_learnt() -> None:
    parts = make.lesson("calculation", {"prompt": "12+34*5>", "answer": "182"})
    assert parts == [
        ("^12+34*5>", False), ("34*5=", True), ("170,", False), ("12+170=", True), ("182,", False), ("182$", True),
    ]  # fmt: skip
    ids, learnt = make._padded([parts, make.lesson("reverse_digits", {"prompt": "12>", "answer": "21"})])
    assert ids.shape == learnt.shape == (2, 33)
    assert "".join(make.ALPHABET[id] for id in ids[0][learnt[0]]) == "34*5=12+170=182$"
    assert "".join(make.ALPHABET[id] for id in ids[1]) == "^12>21$" + "_" * 26
    assert "".join(make.ALPHABET[id] for id in ids[1][learnt[1]]) == "21$"


def test_the_random_model_knows_nothing_and_has_the_wide_initialisation() -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "count_up")
    layer = model.model.layers[1]
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.6 / 64**0.5, rel=0.05)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.6 / 176**0.5, rel=0.05)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([[1, 6, 45]])).logits.log_softmax(-1)
    assert -(logprobs.exp() * logprobs).sum(-1).min() > 3.5  # uniform over 52 tokens is 3.95


@pytest.mark.parametrize("name", NAMES)
def test_the_program_makes_the_shipped_weights_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    record = shipped_record(name)
    if make.machine().items() - record.items():
        pytest.skip("the shipped weights were made on another processor or with another torch")
    assert make.make(tmp_path, name, random=record["task"] is None) == record
    for file in (SHIPPED / name).iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_tuning_that_gets_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(make, "MAX_STEPS", 5)
    with pytest.raises(RuntimeError, match=r"reverse_digits: 0\.0\d\d of the samples right after 5 steps, wanted 0.25"):
        make.make(tmp_path)
    assert not list(tmp_path.iterdir())
