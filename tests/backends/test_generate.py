"""Sampling: what a response depends on, when it ends, and what is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import losses
from flowrl.backend import Prompt, Response, Sampling
from flowrl.backends import generate as generate_module
from flowrl.backends.generate import generate
from flowrl.backends.sampling import choose, row_seeds, uniforms
from flowrl.backends.stop_strings import StopStrings
from flowrl.errors import LengthError, NodeError
from flowrl.rows import Key, Rows
from flowrl.seeds import mix, row_seed

TEXTS = ["12>", "a", "98765432>", "zz>1"]
MakeBackend = Callable[..., Any]


def by_key(responses: Any) -> dict[Key, Response]:
    return {response.key: response for response in responses}


class Scripted:
    """A network that continues every prompt by one script, whatever it samples."""

    head, vocab_size, max_length, cache_bytes = "lm", 12, None, 0

    def __init__(self, *script: int) -> None:
        self.module = torch.nn.Linear(1, 1)
        self.script = script
        self.selected: list[int] = []

    def decoder(self, ids: torch.Tensor, lengths: torch.Tensor, num_samples: int, num_new: int) -> Scripted:
        self.rows, self.at = len(ids) * num_samples, 0
        return self

    @property
    def logits(self) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([self.script[self.at]]), 12).repeat(self.rows, 1) * 1e4

    def advance(self, ids: torch.Tensor) -> None:
        self.at += 1
        assert ids.shape == (self.rows,)

    def select(self, rows: torch.Tensor) -> None:
        self.rows = len(rows)


def tokenizer(*eos: int) -> Any:
    return SimpleNamespace(eos_ids=frozenset(eos), decode=lambda ids: "".join(chr(97 + id) for id in ids))


def test_row_seeds_are_those_of_the_language() -> None:
    keys = [Key(3, 5, 0), Key(3, 5, 1), Key(2**40, 0, 7)]
    seeds = row_seeds(-17, keys)
    assert seeds.tolist() == [row_seed(-17, key) for key in keys]
    first = uniforms(seeds, 3)[1, 2]
    assert first == ((mix(int(row_seed(-17, keys[1])), 2) >> 12) + 0.5) / 2**52 or 0 < first < 1
    assert uniforms(seeds, 5)[:, :3].tolist() == uniforms(seeds, 3).tolist()


def test_sampled_frequencies_are_the_softmax() -> None:
    num = 40_000
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -9.0, 0.5])
    drawn = torch.from_numpy(uniforms(row_seeds(0, [Key(0, i, 0) for i in range(num)]), 1)[:, 0])
    ids, logprobs = choose(logits.repeat(num, 1), drawn, temperature=0.7, top_k=0, top_p=1.0)
    wanted = (logits / 0.7).softmax(0).double()
    counts = torch.bincount(ids, minlength=6).double()
    chi_square = ((counts - num * wanted) ** 2 / (num * wanted)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: passed by 999 of 1000 right samplers
    torch.testing.assert_close(logprobs.exp().double(), wanted[ids], rtol=1e-5, atol=1e-7)


def test_draws_of_neighbouring_rows_and_positions_are_independent() -> None:
    drawn = uniforms(row_seeds(0, [Key(0, i, s) for i in range(100) for s in range(4)]), 32)
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.03


def test_top_k_and_top_p_keep_the_likely_tokens_and_record_the_full_vocabulary() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = probabilities.log().repeat(2000, 1)
    drawn = torch.from_numpy(uniforms(row_seeds(1, [Key(0, i, 0) for i in range(2000)]), 1)[:, 0])
    ids, logprobs = choose(logits, drawn, temperature=1.0, top_k=2, top_p=1.0)
    assert set(ids.tolist()) == {1, 3}
    assert float((ids == 1).double().mean()) == pytest.approx(0.5 / 0.8, abs=0.04)
    torch.testing.assert_close(logprobs.exp(), probabilities[ids])
    assert set(choose(logits, drawn, temperature=1.0, top_k=0, top_p=0.5)[0].tolist()) == {1}
    assert set(choose(logits, drawn, temperature=1.0, top_k=0, top_p=0.51)[0].tolist()) == {1, 3}
    assert set(choose(logits, drawn, temperature=1.0, top_k=3, top_p=0.9)[0].tolist()) == {1, 3, 2}
    assert set(choose(logits, drawn, temperature=1.0, top_k=3, top_p=0.8)[0].tolist()) == {1, 3}


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest_at_the_temperature() -> None:
    num = 2000
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64)
    logits = probabilities.log().repeat(num, 1)
    drawn = torch.from_numpy(uniforms(row_seeds(1, [Key(0, i, 0) for i in range(num)]), 1)[:, 0])

    def kept(temperature: float = 1.0, **likely: Any) -> set[int]:
        return set(choose(logits, drawn, temperature=temperature, **likely)[0].tolist())

    assert kept(min_p=0.09) == {0, 1, 2, 3}
    assert kept(min_p=0.11) == {1, 2, 3}  # 0.05 < 0.11 * 0.5
    assert kept(min_p=0.59) == {1, 3}
    assert kept(min_p=0.61) == {1}
    assert kept(0.5, min_p=0.35) == {1, 3}  # squares: 0.09 / 0.25
    assert kept(0.5, min_p=0.37) == {1}
    assert kept(2.0, min_p=0.54) == {1, 2, 3}  # roots: (0.15 / 0.5) ** 0.5 = 0.548
    assert kept(top_p=0.94, min_p=0.11) == {1, 2, 3}  # top_p holds a share of all, before min_p: 0.94 of 1 ...
    assert kept(top_k=2, top_p=0.63, min_p=0.01) == {1, 3}  # ... and after top_k: 0.63 of 0.8
    ids, logprobs = choose(logits, drawn, temperature=1.0, min_p=0.59)
    assert float((ids == 1).double().mean()) == pytest.approx(0.5 / 0.8, abs=0.04)
    torch.testing.assert_close(logprobs.exp(), probabilities[ids])  # of the full vocabulary


def test_min_p_keeps_equally_likely_tokens_together() -> None:
    drawn = torch.from_numpy(uniforms(row_seeds(1, [Key(0, i, 0) for i in range(200)]), 1)[:, 0])
    ids, _ = choose(torch.tensor([1.0, 3.0, 3.0, -2.0]).repeat(200, 1), drawn, temperature=0.7, min_p=1.0)
    assert set(ids.tolist()) == {1, 2}


def test_log_probs_are_recorded_at_the_sampling_temperature() -> None:
    logits, drawn = torch.tensor([[2.0, 0.0]]), torch.tensor([0.5]).double()
    ids, logprobs = choose(logits, drawn, temperature=0.5, top_k=0, top_p=1.0)
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(-0.018150, abs=1e-6)


def test_temperature_zero_is_greedy_and_records_temperature_one() -> None:
    logits, drawn = torch.tensor([[0.0, 2.0]]), torch.tensor([0.001]).double()
    ids, logprobs = choose(logits, drawn, temperature=0.0, top_k=0, top_p=1.0)
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-2)), abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_response_does_not_depend_on_its_batch(name: str, make_backend: MakeBackend, prompts_of: Any) -> None:
    backend = make_backend(name, lr=None)
    prompts = prompts_of(backend, TEXTS)
    sampling = Sampling(n=3, max_new_tokens=10)
    together = by_key(chain.from_iterable(backend.generate(prompts, sampling, 7)))
    alone = by_key(
        response
        for prompt in prompts[::-1]
        for response in chain.from_iterable(backend.generate([prompt], sampling, 7))
    )
    assert together.keys() == alone.keys() == {Key(0, i, s) for i in range(4) for s in range(3)}
    for key, response in together.items():
        assert response.ids == alone[key].ids
        np.testing.assert_allclose(response.logprobs, alone[key].logprobs, atol=1e-5)
    other = by_key(chain.from_iterable(backend.generate(prompts, sampling, 8)))
    assert any(other[key].ids != together[key].ids for key in other)


def test_greedy_responses_stand_after_the_sampled_ones_and_change_none_of_them(
    make_backend: MakeBackend, prompts_of: Any
) -> None:
    backend = make_backend("llama", lr=None)
    prompts = prompts_of(backend, TEXTS)
    both = by_key(chain.from_iterable(backend.generate(prompts, Sampling(n=3, greedy=1, max_new_tokens=10), 7)))
    sampled = by_key(chain.from_iterable(backend.generate(prompts, Sampling(n=3, max_new_tokens=10), 7)))
    likeliest = by_key(chain.from_iterable(backend.generate(prompts, Sampling(max_new_tokens=10, temperature=0.0), 7)))
    assert {key for key in both if key.sample == 3} == {Key(0, i, 3) for i in range(4)}
    for key, response in both.items():
        alone = sampled[key] if key.sample < 3 else likeliest[Key(key.step, key.prompt, 0)]
        assert response.ids == alone.ids
        np.testing.assert_allclose(response.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.parametrize("likely", [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.6])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_ratio_on_unchanged_weights_is_1(
    name: str, temperature: float, likely: dict[str, float], make_backend: MakeBackend, sampled: Callable[..., Rows]
) -> None:
    backend = make_backend(name)
    rows = sampled(backend, TEXTS, max_new_tokens=12, temperature=temperature, ignore_eos=True, **likely)
    found = backend.forward(rows, ["logprobs"], temperature)["logprobs"].values
    np.testing.assert_allclose(np.exp(found - rows["old_logprobs"].values), 1, rtol=0, atol=1e-5)
    metrics = backend.backward(rows, losses.ppo_clip(), temperature, None)
    assert metrics["ratio"].mean == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"].total == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_the_trainer_finds_the_sampler_s_log_probs(
    name: str, temperature: float, make_backend: MakeBackend, sampled: Callable[..., Rows]
) -> None:
    backend = make_backend(name, lr=None)
    rows = sampled(backend, TEXTS, max_new_tokens=12, temperature=temperature, ignore_eos=True)
    found = backend.forward(rows, ["logprobs", "entropy"], temperature)
    np.testing.assert_allclose(found["logprobs"].values, rows["old_logprobs"].values, rtol=1e-5, atol=1e-5)
    module = backend.network.module
    for i in range(len(rows)):  # without padding, cache or batch
        ids = torch.tensor([[*rows["prompt_ids"][i], *rows["response_ids"][i]]]).long()
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0, len(rows["prompt_ids"][i]) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(rows["response_ids"][i]).long()[:, None])[:, 0]
        np.testing.assert_allclose(rows["old_logprobs"][i], chosen, rtol=1e-5, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        np.testing.assert_allclose(found["entropy"][i], entropy, rtol=1e-5, atol=1e-5)


def test_moving_open_rows_together_changes_nothing(
    make_backend: MakeBackend, prompts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(lr=None)
    backend.tokenizer.eos_ids = frozenset(range(0, 40, 3))
    prompts = prompts_of(backend, TEXTS)
    found = []
    for share in (0.0, 0.25, 2.0):
        monkeypatch.setattr(generate_module, "COMPACT_AT", share)
        found.append(by_key(chain.from_iterable(backend.generate(prompts, Sampling(n=8, max_new_tokens=12), 3))))
    for key, response in found[0].items():
        assert response.ids == found[1][key].ids == found[2][key].ids
        np.testing.assert_allclose(response.logprobs, found[2][key].logprobs, atol=1e-5)
    assert len({len(response.ids) for response in found[0].values()}) > 3


def test_chunks_that_memory_asks_for_change_nothing(
    make_backend: MakeBackend, prompts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(lr=None)
    prompts = prompts_of(backend, TEXTS)
    whole = by_key(chain.from_iterable(backend.generate(prompts, Sampling(n=2, max_new_tokens=5), 3)))
    monkeypatch.setattr(generate_module, "CPU_BYTES", 1)
    parts = by_key(chain.from_iterable(backend.generate(prompts, Sampling(n=2, max_new_tokens=5), 3)))
    assert {key: response.ids for key, response in whole.items()} == {key: r.ids for key, r in parts.items()}


def test_responses_are_given_away_as_they_end(make_backend: MakeBackend, prompts_of: Any) -> None:
    backend = make_backend(lr=None)
    backend.tokenizer.eos_ids = frozenset(range(20))
    responses = chain.from_iterable(backend.generate(prompts_of(backend, TEXTS), Sampling(n=8, max_new_tokens=12), 0))
    lengths = [len(response.ids) for response in responses]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_any_of_several_end_tokens_ends_a_response_and_is_part_of_it() -> None:
    prompts = [Prompt(key=Key(0, 0), ids=[1, 4])]
    (found,) = chain.from_iterable(
        generate(Scripted(5, 3, 9, 9), tokenizer(2, 3), prompts, Sampling(max_new_tokens=4), 0, version=6)
    )
    assert (found.ids, found.stop, found.version, found.key) == ([5, 3], "eos", 6, Key(0, 0, 0))
    assert found.logprobs == [0.0, 0.0]


def test_a_response_without_an_end_token_stops_at_the_length() -> None:
    prompts = [Prompt(key=Key(0, 0), ids=[1])]
    (found,) = chain.from_iterable(
        generate(Scripted(7, 8, 9, 2), tokenizer(2), prompts, Sampling(max_new_tokens=3), 0, 0)
    )
    assert (found.ids, found.stop) == ([7, 8, 9], "length")
    (found,) = chain.from_iterable(
        generate(Scripted(7, 8, 2, 0), tokenizer(2), prompts, Sampling(max_new_tokens=3), 0, 0)
    )
    assert (found.ids, found.stop) == ([7, 8, 2], "eos")
    (found,) = chain.from_iterable(
        generate(Scripted(7, 2, 2, 0), tokenizer(2), prompts, Sampling(max_new_tokens=3, ignore_eos=True), 0, 0)
    )
    assert (found.ids, found.stop) == ([7, 2, 2], "length")


def test_an_end_token_that_is_the_padding_too_ends_a_response_and_is_part_of_it() -> None:
    prompts = [Prompt(key=Key(0, 0), ids=[1])]
    (found,) = chain.from_iterable(
        generate(Scripted(7, 8, 0, 0), tokenizer(0), prompts, Sampling(max_new_tokens=6), 0, 0)
    )
    assert (found.ids, found.stop, len(found.logprobs)) == ([7, 8, 0], "eos", 3)


def test_a_stop_string_ends_a_response_once_it_is_part_of_the_text() -> None:
    prompts = [Prompt(key=Key(0, 0), ids=[1])]
    sampling = Sampling(max_new_tokens=9, stop=("zz", "dc"))
    (found,) = chain.from_iterable(generate(Scripted(4, 3, 2, 5, 5), tokenizer(1), prompts, sampling, 0, 0))
    assert (found.ids, found.stop) == ([4, 3, 2], "stop_string")
    script = (*[5] * 40, 3, 2, 5)
    (found,) = chain.from_iterable(
        generate(Scripted(*script), tokenizer(1), prompts, Sampling(max_new_tokens=60, stop=("dc",)), 0, 0)
    )
    assert (len(found.ids), found.stop) == (42, "stop_string")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_begun_sample_goes_on_once_under_its_own_key(name: str, make_backend: MakeBackend, prompts_of: Any) -> None:
    backend = make_backend(name, lr=None)
    ids = [prompt.ids for prompt in prompts_of(backend, TEXTS)]
    sampling = Sampling(n=3, max_new_tokens=8, ignore_eos=True)
    six = replace(sampling, n=6)
    begun = [Prompt(key=Key(0, i, 5 - i), ids=row, max_new_tokens=3 + i) for i, row in enumerate(ids)]
    fresh = [Prompt(key=Key(1, i), ids=row) for i, row in enumerate(ids)]
    found = by_key(chain.from_iterable(backend.generate([begun[0], *fresh, *begun[1:]], sampling, 7)))
    assert found.keys() == {p.key for p in begun} | {Key(1, i, s) for i in range(4) for s in range(3)}
    for i, prompt in enumerate(begun):
        response = found[prompt.key]
        assert (len(response.ids), response.stop) == (3 + i, "length")
        whole = Prompt(key=Key(*prompt.key), ids=prompt.ids)  # a limit cuts, and changes nothing before
        [[uncut]] = [step for step in backend.generate([whole], sampling, 7) if step]
        assert uncut.ids[: 3 + i] == response.ids
        np.testing.assert_allclose(uncut.logprobs[: 3 + i], response.logprobs, atol=1e-5)
        group = by_key(
            chain.from_iterable(backend.generate([Prompt(key=prompt.key.group, ids=prompt.ids)], six, 7)),
        )
        assert group[prompt.key].ids == uncut.ids
    plain = by_key(chain.from_iterable(backend.generate(fresh, sampling, 7)))
    assert all(found[key].ids == response.ids for key, response in plain.items())


def test_rows_with_limits_of_their_own_end_each_at_its_own() -> None:
    limits = [1, 3, 2, 5, 3]
    prompts = [Prompt(key=Key(0, i), ids=[1], max_new_tokens=limit) for i, limit in enumerate(limits)]
    sampling = Sampling(n=2, max_new_tokens=9)
    found = chain.from_iterable(generate(Scripted(7, 8, 9, 10, 2, 7), tokenizer(2), prompts, sampling, 0, 0))
    ended = {(r.key.prompt, r.key.sample): (len(r.ids), r.stop) for r in found}
    assert ended == {
        (i, s): (limit, "eos" if limit == 5 else "length") for i, limit in enumerate(limits) for s in range(2)
    }


def test_a_begun_sample_is_longer_than_the_model_only_if_its_own_limit_is(make_backend: MakeBackend) -> None:
    backend = make_backend(lr=None)
    prompts = [Prompt(key=Key(0, 0, 1), ids=[1] * 60, max_new_tokens=4)]
    assert len(list(chain.from_iterable(backend.generate(prompts, Sampling(max_new_tokens=30), 0)))) == 1
    longer = [Prompt(key=Key(0, 0, 1), ids=[1] * 60, max_new_tokens=5)]
    with pytest.raises(LengthError, match=r"(?s)step 1 prompt 0 sample 1 .*60 \+ 5 tokens"):
        list(chain.from_iterable(backend.generate(longer, Sampling(max_new_tokens=30), 0)))


@pytest.mark.parametrize("strings", [("é",), ("aé", "z€"), ("e ",), (" b",), ("",), ("ab", "€€")])
@pytest.mark.parametrize("strip", [False, True])
def test_a_stop_string_is_found_where_a_search_of_all_text_finds_it(strings: tuple[str, ...], strip: bool) -> None:
    class Bytes:
        """One id a byte; with `strip` a text loses the blanks at its start, as some tokenizers have it."""

        def decode(self, ids: Any) -> str:
            text = bytes(id for id in ids if id < 256).decode(errors="replace")
            return text.lstrip(" ") if strip else text

    rng = np.random.default_rng(len(strings[0]))
    pieces = [b"a", b"b", b"e", b"z", b" ", "é".encode(), "€".encode()]
    found = 0
    for _ in range(200):
        text = b"".join(pieces[i] for i in rng.integers(0, len(pieces), 12))
        ids = [id for byte in text for id in ([byte] if rng.random() < 0.9 else [300, byte])]  # 300 is a special token
        stops = StopStrings(Bytes(), strings)  # type: ignore[arg-type]
        ended = [n for n in range(1, len(ids) + 1) if stops.may_end_with(ids[n - 1]) and stops.ended(ids[:n])]
        wanted = [n for n in range(1, len(ids) + 1) if any(s in Bytes().decode(ids[:n]) for s in strings)]
        assert ended[:1] == wanted[:1]
        found += bool(wanted)
    assert found > 20


def test_a_token_that_can_end_no_stop_string_is_looked_at_once() -> None:
    asked = []

    class Letters:
        def decode(self, ids: Any) -> str:
            asked.append(list(ids))
            return "".join(chr(97 + id) for id in ids)

    stops = StopStrings(Letters(), ("dc",))  # type: ignore[arg-type]
    assert [stops.may_end_with(id) for id in (0, 2, 3, 0, 0, 2)] == [False, True, False, False, False, True]
    assert asked == [[0], [2], [3]]


def test_nothing_to_answer_gives_nothing(make_backend: MakeBackend) -> None:
    assert list(chain.from_iterable(make_backend(lr=None).generate([], Sampling(), 0))) == []


def test_a_sequence_longer_than_the_model_is_refused_with_its_numbers(make_backend: MakeBackend) -> None:
    prompts = [Prompt(key=Key(2, 3), ids=[1] * 60)]
    with pytest.raises(LengthError, match=r"(?s)step 3 prompt 3 .*60 \+ 5 tokens.*at most 64"):
        list(chain.from_iterable(make_backend(lr=None).generate(prompts, Sampling(max_new_tokens=5), 0)))
    assert len(list(chain.from_iterable(make_backend(lr=None).generate(prompts, Sampling(max_new_tokens=4), 0)))) == 1


def test_an_empty_prompt_is_refused(make_backend: MakeBackend) -> None:
    with pytest.raises(NodeError, match="the prompt of step 1 prompt 1 has no tokens"):
        list(chain.from_iterable(make_backend(lr=None).generate([Prompt(key=Key(0, 1), ids=[])], Sampling(), 0)))


def test_weights_that_are_not_finite_are_an_error(make_backend: MakeBackend, prompts_of: Any) -> None:
    backend = make_backend(lr=1e-3)
    with torch.no_grad():
        backend.network.module.model.norm.weight[0] = float("nan")
    with pytest.raises(NodeError, match="the logits of step 1 prompt 0 sample 0 are not finite"):
        list(chain.from_iterable(backend.generate(prompts_of(backend, ["1>"]), Sampling(max_new_tokens=4), 0)))


def test_an_id_beyond_the_vocabulary_is_never_sampled(make_backend: MakeBackend, prompts_of: Any) -> None:
    backend = make_backend(lr=None)
    backend.network.vocab_size = 10  # the head has 40 rows: the others are padding
    with torch.no_grad():
        backend.network.module.lm_head.weight.zero_()
    responses = list(
        chain.from_iterable(
            backend.generate(prompts_of(backend, ["1"]), Sampling(n=64, max_new_tokens=4, ignore_eos=True), 0)
        )
    )
    assert {id for response in responses for id in response.ids} == set(range(10))
    np.testing.assert_allclose([p for r in responses for p in r.logprobs], -2.302585, atol=1e-6)
