"""Critics and reward models from any folder of Hugging Face: the head that it holds, or one that starts at zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import flowrl as fl
from flowrl.backends.hf import HFBackend
from flowrl.errors import BackendError
from flowrl.rows import Key, Ragged, Rows

ONE_RANK = SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1)
MakeBackend = Callable[..., HFBackend]


@pytest.fixture(scope="module")
def classifiers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each of `folders` as ``AutoModelForSequenceClassification`` saves it, with a head of one label."""
    root = tmp_path_factory.mktemp("classifiers")
    for name, folder in folders.items():
        _save(name, folder, root / name, 1)
    return {name: root / name for name in folders}


def _save(name: str, source: Path, target: Path, num_labels: int) -> None:
    torch.manual_seed(len(name))
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=num_labels)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(target)
    for path in source.glob("tokenizer*"):
        (target / path.name).write_bytes(path.read_bytes())


def _rows() -> Rows:
    """Lengths differ, so that rows are padded; one response is empty."""
    prompts, responses = ([1, 5, 6], [1, 7], [1, 5, 6, 7, 8]), ([3, 4, 5, 6, 2], [8], [])
    columns = {"prompt_ids": Ragged.pack(prompts, "int32"), "response_ids": Ragged.pack(responses, "int32")}
    return Rows([Key(0, i, 0) for i in range(3)], columns)


def _without_flowrl(folder: Path, rows: Rows) -> list[torch.Tensor]:
    """What the folder's own head makes of every token of each row by itself, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.inference_mode():
            found.append(model.score(model.base_model(ids)[0])[0, :, 0])
            assert found[-1][-1] == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_saved_classifier_scores_and_values_as_transformers_does(name: str, classifiers: dict[str, Path]) -> None:
    rows = _rows()
    wanted = _without_flowrl(classifiers[name], rows)
    model = fl.Model(str(classifiers[name]), head="score")
    scores = HFBackend(model, ONE_RANK, "cpu").forward(rows, ["scores"], 1.0)["scores"]
    np.testing.assert_allclose(scores, [float(each[-1]) for each in wanted], atol=1e-5)
    assert np.abs(scores).min() > 1e-3
    critic = HFBackend(fl.Model(str(classifiers[name]), head="value"), ONE_RANK, "cpu")
    values = critic.forward(rows, ["values"], 1.0)["values"]
    for row, each in enumerate(wanted):  # the value before each response token, read at the token that it follows
        start = len(rows["prompt_ids"][row])
        np.testing.assert_allclose(values[row], each[start - 1 : len(each) - 1], atol=1e-5)


@pytest.mark.parametrize("head", ["value", "score"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_language_model_gets_a_head_that_starts_at_zero(name: str, head: Any, make_backend: MakeBackend) -> None:
    backend = make_backend(name, head=head)
    output = {"value": "values", "score": "scores"}[head]
    found = backend.forward(_rows(), [output], 1.0)[output]
    assert not np.any(found if head == "score" else found.values)
    assert backend.network.module.score.weight.shape == (1, 32)


@pytest.mark.parametrize("head", ["value", "score"])
def test_a_trained_head_goes_through_a_checkpoint_and_is_a_folder_for_transformers(
    head: Any, make_backend: MakeBackend, tmp_path: Path
) -> None:
    rows = _rows()
    trained = make_backend(head=head)
    with torch.no_grad():
        torch.nn.init.normal_(trained.network.module.score.weight, generator=torch.Generator().manual_seed(0))
    output = {"value": "values", "score": "scores"}[head]
    before = trained.forward(rows, [output], 1.0)[output]
    trained.save(tmp_path / "step")
    resumed = make_backend(head=head)
    resumed.load(tmp_path / "step")
    anew = HFBackend(fl.Model(str(tmp_path / "step"), head=head), ONE_RANK, "cpu")
    for backend in (resumed, anew):
        after = backend.forward(rows, [output], 1.0)[output]
        assert np.array_equal(*(getattr(each, "values", each) for each in (before, after)))
    last = [float(each[-1]) for each in _without_flowrl(tmp_path / "step", rows)]
    if head == "score":
        np.testing.assert_allclose(before, last, atol=1e-5)


def test_a_classifier_of_several_labels_is_no_reward_model(folders: dict[str, Path], tmp_path: Path) -> None:
    _save("two", folders["llama"], tmp_path / "two", 2)
    with pytest.raises(BackendError, match=r"(?s)has a head of another size.*score\.weight: \[2, 32\].*one output"):
        HFBackend(fl.Model(str(tmp_path / "two"), head="score"), ONE_RANK, "cpu")


def test_a_model_that_sees_what_comes_later_is_no_reward_model(folders: dict[str, Path], tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    for path in folders["llama"].glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(BackendError, match="backend 'hf' has no head 'score' for BertForSequenceClassification"):
        HFBackend(fl.Model(str(tmp_path), head="score"), ONE_RANK, "cpu")
