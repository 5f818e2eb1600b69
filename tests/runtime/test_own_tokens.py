"""Reward models and critics that are not the policy: of another tokenizer, another backend, another mesh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)

import flowrl as fl
from flowrl import advantages, losses
from flowrl.check import check
from flowrl.errors import ProvenanceError
from flowrl.rows import Key
from flowrl.runtime import run
from flowrl.runtime.registry import describe, load_backend

from .hands import Hands, policy

ALPHABET = ["<pad>", "<bos>", "<end>", "<u>", "<a>", "<?>", *map(chr, range(126, 31, -1))]
TEMPLATE = (
    "<bos>{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that reads characters, in ids that mean something else to a model of bytes."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    ids = {character: i for i, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<?>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.decoder = decoders.Fuse()
    special = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<end>",
        "additional_special_tokens": ["<u>", "<a>"],
    }
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_embd=16, n_layer=1, n_head=2, n_positions=80, num_labels=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    GPT2ForSequenceClassification(config).save_pretrained(folder)
    return folder


TEXTS = [{"prompt": f"{i}+{i}=", "answer": i} for i in range(4)]
CHATS = [{"messages": [{"role": "user", "content": f"{i}+{i}?"}], "answer": i} for i in range(4)]


def scoring(folder: Path, rows: Any = TEXTS, *, text: bool = True, length: int = 5, chat: bool = False) -> fl.Graph:
    @fl.graph
    def graph() -> None:
        model = policy()
        prompts = fl.prompts(rows, batch=2, shuffle=False, chat=chat)
        samples = fl.rollout(model, prompts, n=3, max_new_tokens=length)
        scores = fl.score(fl.Model(str(folder), head="score", name="reward"), samples, text=text)
        fl.update(model, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip())

    return graph()


def sampled(graph: fl.Graph) -> tuple[Hands, list[Key]]:
    hands = Hands(graph)
    hands.fire("prompts")
    hands.fire("rollout", hands.rows("prompts").keys)
    return hands, sorted(hands.rows("rollout").keys)


def without_flowrl(folder: Path, texts: list[str]) -> list[float]:
    """What transformers makes of whole texts, whose special tokens are written out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(each.count(1) == 1 and each[0] == 1 for each in ids)
    with torch.inference_mode():
        return [float(model(torch.tensor([each])).logits[0, 0]) for each in ids]


def test_text_is_scored_in_the_reward_models_own_tokens(reward_folder: Path) -> None:
    hands, keys = sampled(scoring(reward_folder))
    hands.fire("score", keys)
    samples = hands.rows("rollout").select(keys)
    texts = [
        f"<bos>{TEXTS[key.prompt]['prompt']}{response}{'<end>' if stop == 'eos' else ''}"
        for key, response, stop in zip(keys, samples["response"], samples["stop"], strict=True)
    ]
    scores = hands.rows("score").select(keys)["scores"].tolist()
    assert scores == pytest.approx(without_flowrl(reward_folder, texts), abs=1e-4)
    assert len(set(scores)) > 3


@pytest.mark.parametrize("chat", [False, True])
def test_a_chat_goes_through_the_reward_models_own_template(reward_folder: Path, chat: bool) -> None:
    """Messages of the data set, and texts that ``chat=True`` makes messages."""
    hands, keys = sampled(scoring(reward_folder, TEXTS if chat else CHATS, chat=chat))
    hands.fire("score", keys)
    samples = hands.rows("rollout").select(keys)
    said = [f"{key.prompt}+{key.prompt}{'=' if chat else '?'}" for key in keys]
    texts = [f"<bos><u>{one}<end><a>{other}<end>" for one, other in zip(said, samples["response"], strict=True)]
    scores = hands.rows("score").select(keys)["scores"].tolist()
    assert scores == pytest.approx(without_flowrl(reward_folder, texts), abs=1e-4)


def test_a_response_that_ended_by_itself_ends_in_the_reward_models_tokens(reward_folder: Path) -> None:
    from flowrl.runtime.own_tokens import in_own_tokens

    tokenizer = load_backend("hf").load_tokenizer(str(reward_folder))
    columns = {
        "prompt": ["ab", "<bos>ab"], "response": ["c", ""], "prompt_messages": [None, None], "stop": ["eos", "length"]
    }  # fmt: skip
    rows = in_own_tokens(tokenizer, [Key(0, 0, 0), Key(0, 1, 0)], columns, max_length=None, at=None)  # type: ignore[arg-type]
    a, b, c = (ALPHABET.index(character) for character in "abc")
    assert [ids.tolist() for ids in rows["prompt_ids"]] == [[1, a, b, c, 2], [1, a, b]]
    assert rows["response_ids"].lengths.tolist() == [0, 0]


def test_a_sample_that_is_too_long_for_the_reward_model_is_named(reward_folder: Path) -> None:
    hands, keys = sampled(scoring(reward_folder, [{"prompt": "1" * 79}, {"prompt": "1"}]))
    hands.try_to_fire("score", keys)
    failure = hands.failure()
    assert failure["type"] == "LengthError"
    assert failure["problem"].startswith("prompt and response of step 1 prompt 0 sample 0 are longer than the model")
    assert failure["wanted"] == "at most 80"


def test_the_ids_of_another_tokenizer_are_refused_before_the_run(reward_folder: Path) -> None:
    facts = {"describe": lambda model: describe(model.backend, model.source), "gpus": 0}
    assert check(scoring(reward_folder), **facts) == []  # type: ignore[arg-type]
    [problem] = check(scoring(reward_folder, text=False), **facts)  # type: ignore[arg-type]
    assert isinstance(problem, ProvenanceError)
    assert problem.fix == "fl.score(reward, samples, text=True): it then reads the text in its own tokens"


# --- a whole run: three backends and meshes ---------------------------------------------------------------------------


def ppo(folder: Path) -> fl.Graph:
    """A policy and a critic of transformers, each on its own mesh, and a reward model of another backend."""

    @fl.graph
    def graph() -> None:
        mesh = [fl.Mesh(dp=1, device="cpu", name=name) for name in ("actor", "values", "rewards")]
        start = "builtin:count_up"
        model = fl.Model(start, mesh=mesh[0], optimizer=fl.AdamW(lr=1e-3))
        critic = fl.Model(start, mesh=mesh[1], head="value", name="critic", optimizer=fl.AdamW(lr=1e-2))
        judge = fl.Model(str(folder), mesh=mesh[2], backend="tiny", head="score", name="reward")
        samples = fl.rollout(model, fl.prompts("builtin:count_up", batch=4), n=2, max_new_tokens=4)
        scores = fl.score(judge, samples, text=True)
        values = fl.values(critic, samples)
        advantage = advantages.gae(samples, advantages.token_rewards(samples, scores), values)
        fl.update(model, samples, advantage, loss=losses.ppo_clip())
        fl.update(critic, samples, advantage, values, loss=losses.value_clip(), name="fit_critic")

    return graph()


def test_critic_and_reward_model_of_other_backends_and_meshes_resume_from_a_checkpoint(tmp_path: Path) -> None:
    tiny = load_backend("tiny")
    from flowrl.runtime.ranks import Rank

    judge: Any = tiny(fl.Model("reward", backend="tiny", head="score"), Rank(), "cpu")
    torch.nn.init.normal_(judge.network.module.score.weight, generator=torch.Generator().manual_seed(0))
    judge.save(tmp_path / "judge")
    whole = run(ppo(tmp_path / "judge"), steps=4, run_dir=tmp_path / "whole", save_every=2)
    run(ppo(tmp_path / "judge"), steps=2, run_dir=tmp_path / "parts", save_every=2)
    resumed = run(ppo(tmp_path / "judge"), steps=4, run_dir=tmp_path / "parts", save_every=2, resume=True)
    assert (whole.steps, resumed.steps) == (4, 2)
    for model in ("policy", "critic"):
        files = [
            tmp_path / part / "checkpoints" / "step-000004" / model / "model.safetensors" for part in ("whole", "parts")
        ]
        assert files[0].read_bytes() == files[1].read_bytes(), model
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert len({line["reward"] for line in lines}) == 4
    critic = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "whole" / "checkpoints" / "step-000004" / "critic"
    )
    assert critic.score.weight.detach().any()
    shutil.rmtree(tmp_path / "whole")
