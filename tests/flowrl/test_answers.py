"""Given answers as ids: behind a text, behind chat messages, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flowrl.answers import Answer, encode_answer
from flowrl.backends.hf_tokenizer import HFTokenizer
from flowrl.backends.tiny_source import EOS, TinyTokenizer
from flowrl.errors import DataError

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, END, TURN_END = 1, 2, 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "ab"}]
TOOLS = [
    {"role": "assistant", "content": "call"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "so 42"},
]


def make_tokenizer(folder: Path, template: str = CHATML, **backend: Any) -> HFTokenizer:
    """One id a character; special tokens in front."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789 .,:!?\n▁"
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *letters])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    for part, value in backend.items():
        setattr(tokenizer, part, value)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    more = ["<|im_start|>", "<|im_end|>"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, additional_special_tokens=more)
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{END}, {TURN_END}]}}')
    return HFTokenizer(folder)


def trained_text(tokenizer: HFTokenizer, answer: Answer) -> str:
    """The trained ids as text, special tokens spelled out."""
    ids = [token for token, on in zip(answer.ids, answer.mask, strict=True) if on]
    text: str = tokenizer.wrapped.decode(ids)
    return text


# --- text


def test_an_answer_to_a_text_follows_it_without_a_begin_and_with_an_end(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    answer = encode_answer(tokenizer, "ab", "cd")
    assert [*tokenizer.encode("ab"), *answer.ids] == [*tokenizer.encode("abcd"), END]
    assert answer.mask == [True] * 3
    assert encode_answer(TinyTokenizer(), "ab", "cd") == Answer([*b"cd", EOS], [True] * 3)


@pytest.mark.parametrize("prompt", ["ab", ASKED], ids=["text", "chat"])
def test_an_empty_answer_is_its_end_alone(prompt: Any, tmp_path: Path) -> None:
    assert encode_answer(TinyTokenizer(), prompt, "") == Answer([EOS], [True])
    last = END if isinstance(prompt, str) else TURN_END
    assert encode_answer(make_tokenizer(tmp_path), prompt, "") == Answer([last], [True])


def test_a_tokenizer_that_puts_a_space_in_front_of_a_text_puts_none_between_prompt_and_answer(tmp_path: Path) -> None:
    """As Llama's: alone, ``cd`` is ``▁cd``; behind ``ab`` that would be another text."""
    space = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = make_tokenizer(tmp_path, normalizer=space)
    assert tokenizer.wrapped.decode(encode_answer(tokenizer, "ab", "cd").ids) == "cd</s>"
    assert tokenizer.wrapped.decode(tokenizer.encode_text("cd")) == "▁cd"


def test_an_answer_that_would_change_the_prompts_last_token_is_tokenized_on_its_own(tmp_path: Path) -> None:
    """A token may span the border (``ab`` + ``cd`` = ``a`` ``bc`` ``d``): the prompt's ids stay what they are."""

    class Merging(TinyTokenizer):
        def encode_text(self, text: str) -> list[int]:
            return list(text.replace("bc", "\x01").encode())

    tokenizer = Merging()
    assert tokenizer.encode("abcd")[: len(tokenizer.encode("ab"))] != tokenizer.encode("ab")
    assert encode_answer(tokenizer, "ab", "cd").ids == [*b"cd", EOS]


def test_an_answer_of_a_tokenizer_without_an_end_is_refused() -> None:
    class Endless(TinyTokenizer):
        eos_ids = frozenset()
        eos_id = None

    with pytest.raises(DataError, match="no end-of-sequence id to put behind an answer"):
        encode_answer(Endless(), "ab", "cd")


# --- chat


def test_an_answer_to_chat_extends_the_prompts_ids_and_ends_where_sampling_would(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    answer = encode_answer(tokenizer, ASKED, "cd")
    whole = tokenizer.encode_chat([*ASKED, {"role": "assistant", "content": "cd"}], generation_prompt=False)
    assert [*tokenizer.encode(ASKED), *answer.ids, tokenizer.encode_text("\n")[0]] == whole
    assert trained_text(tokenizer, answer) == "cd<|im_end|>"
    for same in ({"role": "assistant", "content": "cd"}, [{"role": "assistant", "content": "cd"}]):
        assert encode_answer(tokenizer, ASKED, same) == answer


def test_the_mask_of_a_tokenizer_that_pads_with_its_end_is_whole(tmp_path: Path) -> None:
    """What is trained is never found by looking for the first end, or for padding."""
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.wrapped.pad_token = tokenizer.wrapped.eos_token
    answer = encode_answer(tokenizer, "ab", "c</s>d")
    assert (answer.ids[-1], answer.ids.count(END), answer.mask) == (END, 2, [True] * len(answer.ids))


def test_a_token_that_would_span_the_start_of_an_answer_leaves_the_prompts_ids_alone(tmp_path: Path) -> None:
    """The generation prompt ends with a line break, and two of them are one token of many vocabularies."""
    both = normalizers.Replace("\n\n", "?")
    tokenizer = make_tokenizer(tmp_path, normalizer=both)
    answer = encode_answer(tokenizer, ASKED, "\ncd")
    assert trained_text(tokenizer, answer) == "\ncd<|im_end|>"
    said = [*ASKED, {"role": "assistant", "content": "\ncd"}]
    assert "assistant?cd" in tokenizer.wrapped.decode(tokenizer.encode_chat(said))


def test_a_template_without_an_end_gets_the_tokenizers(tmp_path: Path) -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = make_tokenizer(tmp_path, template)
    assert trained_text(tokenizer, encode_answer(tokenizer, ASKED, "cd")) == "cd\n</s>"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefix differences", "marks of the template"])
def test_of_several_turns_only_the_assistants_are_trained(template: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    assert (tokenizer.written(ASKED) is None) == (template == CHATML)
    answer = encode_answer(tokenizer, ASKED, TOOLS)
    whole = tokenizer.encode_chat([*ASKED, *TOOLS], generation_prompt=False)
    assert [*tokenizer.encode(ASKED), *answer.ids] == whole[:-1]  # the line break behind the last turn
    assert trained_text(tokenizer, answer) == "call<|im_end|>so 42<|im_end|>"


def test_the_tiny_tokenizer_masks_the_turns_of_tools() -> None:
    answer = encode_answer(TinyTokenizer(), ASKED, TOOLS)
    trained = [token for token, on in zip(answer.ids, answer.mask, strict=True) if on]
    assert trained == [*b"call", EOS, *b"so 42", EOS]
    assert bytes(token for token in answer.ids if token < EOS) == b"call\ntool: 42\nassistant: so 42"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # The generation prompt opens a thought that the assistant's turn does not have.
        (
            CHATML.replace("assistant\n{% endif", "assistant\nthink{% endif"),
            r"the ids of the prompt: .* at position 21",
        ),
        # Turns before the last are rewritten.
        (
            CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else 'x' }}"),
            r"the ids of turn 1 of the answer: they differ at position 21",
        ),
    ],
)
def test_a_template_that_does_not_continue_is_refused_with_the_first_position(
    template: str, message: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    answer: Any = "cd" if "prompt" in message else TOOLS
    with pytest.raises(DataError, match=message):
        encode_answer(tokenizer, ASKED, answer)


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        ("ab", {"role": "assistant", "content": "c"}, r"(?s)the answer to a text is no text.*chat=True"),
        ("ab", 7, "the answer to a text is no text"),
        (ASKED, 7, "neither text nor messages"),
        (ASKED, [], "neither text nor messages"),
        (ASKED, [{"content": "c"}], "neither text nor messages"),
        (ASKED, {"role": "user", "content": "c"}, r"(?s)the first turn of an answer is not the assistant's.*user"),
        (ASKED, TOOLS[:2], r"(?s)the last turn of an answer is not the assistant's.*tool"),
    ],
)
def test_what_is_no_answer_is_refused(prompt: Any, answer: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode_answer(TinyTokenizer(), prompt, answer)
