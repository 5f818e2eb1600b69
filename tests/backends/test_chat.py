"""A conversation goes on from the ids that were sampled, through the chat template or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.backends.hf_tokenizer import HFTokenizer
from flowrl.backends.tiny_source import BOS, EOS, TinyTokenizer
from flowrl.errors import TemplateError

VOCAB = {"a": 0, "b": 1, "ab": 2, "<bos>": 3, "<end>": 4, "U": 5, "M": 6, "T": 7, ".": 8, "c": 9, "<x>": 10, " ": 11}
KEEPS = (
    "<bos>{% for m in messages %}{{ {'user': 'U', 'assistant': 'M', 'tool': 'T'}[m.role] }}{{ m.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}M{% endif %}"
)
"""Keeps every message as it is."""
FORGETS = KEEPS.replace("{{ m.content }}", "{{ m.content.split('.')[-1] if m.role == 'assistant' else m.content }}")
"""Drops what an assistant thought before its last point."""
STRIPS = KEEPS.replace("{{ m.content }}", "{{ m.content | trim }}")


def toy(folder: Path, template: str) -> HFTokenizer:
    """Text and ids are not one to one: "ab" is one id, or two."""
    merges = [("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<end>", additional_special_tokens=["<x>"]
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return HFTokenizer(folder)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROMPT = [said("user", "c")]
PROMPT_IDS = [3, 5, 9, 4, 6]


def test_what_was_sampled_is_never_encoded_again(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path, KEEPS)
    assert tokenizer.encode(PROMPT) == PROMPT_IDS
    assert tokenizer.encode_text("ab") == [2]  # the model may say it in two tokens
    sampled = [0, 1, 4]
    turns = [said("assistant", "ab"), said("tool", "c")]
    reply = tokenizer.encode_reply(PROMPT, PROMPT_IDS, turns, sampled)
    assert reply == [7, 9, 4, 6]
    record = [*sampled, *reply, 2, 4]
    turns += [said("assistant", "ab"), said("tool", "ab")]
    assert tokenizer.encode_reply(PROMPT, PROMPT_IDS, turns, record) == [7, 2, 4, 6]
    whole = tokenizer.wrapped.apply_chat_template([*PROMPT, *turns], tokenize=False, add_generation_prompt=True)
    ids = [*PROMPT_IDS, *record, 7, 2, 4, 6]
    assert tokenizer.decode(ids, special=True) == whole
    assert ids != tokenizer.encode_text(whole)  # [2] where the model said [0, 1]


def test_special_tokens_within_a_turn_stay_ids(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path, KEEPS)
    sampled = [0, 10, 1, 4]
    assert tokenizer.decode(sampled) == "ab"
    turns = [said("assistant", tokenizer.decode(sampled[:-1], special=True)), said("tool", "c")]
    assert tokenizer.encode_reply(PROMPT, PROMPT_IDS, turns, sampled) == [7, 9, 4, 6]


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path, KEEPS)
    turns = [said("assistant", "ab"), said("tool", "c")]
    assert tokenizer.encode_reply(PROMPT, PROMPT_IDS, turns, [0, 1]) == [4, 7, 9, 4, 6]


@pytest.mark.parametrize(
    ("template", "sampled", "where"),
    [
        (FORGETS, [9, 8, 0, 1, 4], r"'ab<end>Tc<end>M' at token 5 of the record, in the response, character 0"),
        (FORGETS, [0, 8, 0, 1, 4], r"'b<end>Tc<end>M' at token 6 of the record, in the response, character 1"),
        (STRIPS, [2, 11, 4], r"'<end>Tc<end>M' at token 6 of the record, in the response, character 2"),
        (KEEPS, [0, 1, 3], r"'end>Tc<end>M' at token 7 of the record, in the response, character 3"),
    ],
    ids=["thought", "same beginning", "blank", "other end"],
)
def test_a_template_that_rewrites_a_turn_is_refused_at_the_first_differing_position(
    tmp_path: Path, template: str, sampled: list[int], where: str
) -> None:
    tokenizer = toy(tmp_path, template)
    text = tokenizer.decode(sampled[:-1], special=True)
    with pytest.raises(TemplateError, match="otherwise than it was sampled") as caught:
        tokenizer.encode_reply(PROMPT, PROMPT_IDS, [said("assistant", text), said("tool", "c")], sampled)
    assert caught.value.found == where
    assert str(caught.value.wanted).endswith("the text of the ids")


def test_a_template_that_rewrites_the_prompt_once_there_is_an_answer_is_refused(tmp_path: Path) -> None:
    template = KEEPS.replace("<bos>", "<bos>{% if messages | length > 1 %}ab{% endif %}")
    tokenizer = toy(tmp_path, template)
    with pytest.raises(TemplateError) as caught:
        tokenizer.encode_reply(PROMPT, PROMPT_IDS, [said("assistant", "a"), said("tool", "c")], [0, 4])
    assert caught.value.found == "'abUc<end>Ma<end>Tc<end>M' at the prompt, character 5"


def test_a_prompt_of_other_ids_than_its_messages_is_refused_and_one_cut_on_its_left_is_not(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path, KEEPS)
    turns = [said("assistant", "a"), said("tool", "c")]
    assert tokenizer.encode_reply(PROMPT, PROMPT_IDS[2:], turns, [0, 4]) == [7, 9, 4, 6]
    with pytest.raises(TemplateError, match="the ids of a prompt are not those of its messages"):
        tokenizer.encode_reply(PROMPT, [3, 5, 0, 4, 6], turns, [0, 4])


def test_a_tiny_model_s_lines_go_on_from_its_bytes() -> None:
    tokenizer = TinyTokenizer()
    prompt = [said("user", "1+1")]
    ids = tokenizer.encode(prompt)
    sampled = [*b"2\xff", EOS]
    turns: Sequence[Mapping[str, Any]] = [said("assistant", tokenizer.decode(sampled)), said("tool", "ok")]
    reply = tokenizer.encode_reply(prompt, ids, turns, sampled)
    assert bytes(reply) == b"\ntool: ok\nassistant: "
    whole = [said("assistant", "2"), said("tool", "ok")]
    sent = tokenizer.encode_reply(prompt, ids, whole, [*b"2"])  # what a stop string ended is closed
    assert [*ids, *b"2", *sent] == tokenizer.encode([*prompt, *whole])
    assert ids[0] == BOS
    turns = [said("assistant", "3"), said("tool", "ok")]
    with pytest.raises(TemplateError) as caught:
        tokenizer.encode_reply(prompt, ids, turns, sampled)
    assert f"at token {len(ids)} of the record" in str(caught.value.found)
