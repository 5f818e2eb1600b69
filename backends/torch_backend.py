"""The whole contract over one `Network`: everything of a backend that does not depend on where its model comes from.

A model is replicated on every rank of its mesh; ranks meet in `step` alone, where gradients are summed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from flowrl.backend import HEAD_OF, Metrics, Output, Prompt, Ranks, Response, Sampling, Sum, Tokenizer
from flowrl.checksum import weights_checksum
from flowrl.errors import BackendError, CheckpointError, NodeError
from flowrl.loss import TOPK_IDS, TRAINED, Loss
from flowrl.model import Model
from flowrl.rows import Ragged, Rows

from .batch import (
    Batch,
    check_prompts,
    groups_of,
    make_batch,
    mask_of,
    micro_batches,
    packed,
    selected_rows,
    sequences,
    trained_rows,
)
from .drift import drift, merge, to_metrics
from .generate import generate
from .network import Network
from .optimizer import Optimizer
from .readout import TOPK, check_ids, check_k, read_logits
from .sampling import scaled_logits
from .state import named_state, replace_state

FORWARD_TOKENS = 1 << 15
"""Padded tokens of one pass without a gradient; only speed depends on it."""
LOGITS_NUMBERS = 1 << 26
"""Most logits at a time, 256 MiB of float32; when there are more they are read in parts, and again in backward."""
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "flowrl_state.json"


class TorchBackend:
    """One model on one rank, in torch; see `flowrl.backend.Backend` for what each method promises."""

    def __init__(self, model: Model, ranks: Ranks, network: Network, tokenizer: Tokenizer) -> None:
        if ranks.world_size != ranks.dp_size:
            raise BackendError(
                f"backend '{model.backend}' replicates model '{model.name}' and cannot split it",
                found=str(model.mesh),
                wanted="a mesh with dp alone",
                fix="fl.Mesh(dp=N), or a backend that splits a model",
            )
        self.version = 0
        self.tokenizer = tokenizer
        self.model, self.ranks, self.network = model, ranks, network
        network.module.eval()  # dropout off: the trainer's log-probs have to be those of the sampler
        network.module.requires_grad_(model.optimizer is not None)
        parameters = dict(network.module.named_parameters())
        self.optimizer = Optimizer(parameters, model.optimizer, ranks) if model.optimizer else None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[list[Response]]:
        """Yield the responses that each decoding step ends."""
        self._check_head(["logprobs"])
        return generate(self.network, self.tokenizer, prompts, sampling, seed, self.version)

    @torch.inference_mode()
    def forward(self, rows: Rows, outputs: Sequence[Output], temperature: float, k: int = 0) -> Rows:
        """Outputs of the response tokens, without a gradient; log-probs at temperature 0 are those at 1."""
        self._check_head(outputs)
        check_prompts(rows)
        if "topk_ids" in rows.columns:
            check_ids(rows, "topk_ids", self.network.vocab_size, self.model.name)
            k = rows["topk_ids"].values.shape[-1]
        elif not TOPK.isdisjoint(outputs):
            check_k(k, self._num_ids, self.model.name)
        parts = [
            self._forward(rows.take(part), outputs, temperature, k)
            for part in micro_batches(_lengths(rows), FORWARD_TOKENS)
        ]
        offsets = rows["response_ids"].offsets
        columns: dict[str, Any] = {}
        for name in outputs:
            shape, dtype = (0, k) if name in TOPK else (0,), np.int32 if name == "topk_ids" else np.float32
            values = np.concatenate([np.zeros(shape, dtype), *(part[name] for part in parts if name in part)])
            columns[name] = values if name == "scores" else Ragged(values, offsets - offsets[0])
        return Rows(rows.keys, columns)

    def backward(self, rows: Rows, loss: Loss, temperature: float, max_tokens: int | None) -> Metrics:
        """Add the gradient of the loss's unnormalised sum; rows that are not trained are left out at once."""
        self._trained()
        self._check_head([name for name in TRAINED if name in loss.reads])
        check_prompts(rows)
        if "topk_logprobs" in loss.reads:
            check_ids(rows, TOPK_IDS, self.network.vocab_size, self.model.name)
        trained = rows.take(trained_rows(mask_of(rows)))
        selected = trained.take(selected_rows(trained, loss))
        sums: dict[str, Tensor] = {}
        tokens = 0
        for part in micro_batches(_lengths(selected), max_tokens, groups_of(selected) if loss.couples else None):
            some = selected.take(part)
            wanted = packed(mask_of(some)).astype(np.bool_)
            batch = make_batch(some, self._device, wanted, share=self.network.shares_prompts)
            tokens += int(wanted.sum())
            merge(sums, self._backward(batch, loss, temperature))
        metrics = to_metrics(sums, tokens, len(selected), loss)
        if loss.selects_by:
            metrics["left_out"] = Sum(float(len(trained) - len(selected)), float(len(trained)))
        return metrics

    def step(self, denominator: float, clip_grad: float | None = None) -> Metrics:
        """Sum the gradients over dp, divide once, clip, optimise."""
        return self._trained().step(denominator, clip_grad)

    def publish(self, version: int) -> None:
        """Name the weights as they are now."""
        self.version = version

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The complete state; the tensors are the model's own, so copy what has to outlive the next step."""
        yield from named_state(self.network.module).items()

    def import_weights(self, tensors: Mapping[str, Tensor], version: int) -> str:
        """Replace the complete state, and return its checksum."""
        replace_state(self.network.module, tensors)
        if self.optimizer:
            self.optimizer.read_weights()
        self.version = version
        return self.checksum()

    def checksum(self) -> str:
        """Of the weights as they are now."""
        return weights_checksum(self.export_weights())

    def save(self, folder: Path) -> None:
        """Write an ordinary model folder and beside it the optimizer; ranks hold the same, and rank 0 writes."""
        if self.ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._save_model(folder)
            if self.optimizer:
                save_file({k: v.contiguous() for k, v in self.optimizer.state().items()}, folder / OPTIMIZER_FILE)
            state = {
                "version": self.version,
                "num_steps": self.optimizer.num_steps if self.optimizer else 0,
                "weights": self.checksum(),
            }
            (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        if self.ranks.world_size > 1:
            dist.barrier()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: a file is missing, or the weights are not those that were saved.
        """
        wanted = [STATE_FILE, *([OPTIMIZER_FILE] if self.optimizer else [])]
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"there is no complete checkpoint of model '{self.model.name}' in {folder}",
                found=f"no {' and no '.join(missing)}",
                wanted=", ".join(wanted),
            )
        state = json.loads((folder / STATE_FILE).read_text())
        tensors = self._load_model(folder)
        found = weights_checksum(tensors.items())
        if found != state["weights"]:
            raise CheckpointError(
                f"the weights in {folder} are not those that were saved", found=found, wanted=state["weights"]
            )
        optimizer_state = load_file(folder / OPTIMIZER_FILE) if self.optimizer else {}
        replace_state(self.network.module, tensors)
        if self.optimizer:
            self.optimizer.load_state(optimizer_state, state["num_steps"])
        self.version = state["version"]

    def _save_model(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer."""
        raise NotImplementedError

    def _load_model(self, folder: Path) -> dict[str, Tensor]:
        """The complete state that `_save_model` wrote, by the names of `export_weights`."""
        raise NotImplementedError

    @property
    def _device(self) -> torch.device:
        return next(self.network.module.parameters()).device

    @property
    def _num_ids(self) -> int:
        """Tokens that may be among the most likely: not those that only fill the vocabulary up."""
        return min(self.network.vocab_size, self.tokenizer.num_ids)

    def _forward(
        self, rows: Rows, outputs: Sequence[Output], temperature: float, k: int
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Each output of some rows as one packed array; none of rows without a token."""
        found: dict[str, Tensor] = {}
        if "scores" in outputs:
            found["scores"] = self._scores(rows)
        elif rows["response_ids"].lengths.any():
            batch = make_batch(rows, self._device, share=self.network.shares_prompts)
            at = _ids_of(batch, "topk_ids") if "topk_ids" in rows.columns else None
            found = self._read(self._states(batch), batch.target, at, temperature, outputs=outputs, k=k)
        return {
            name: (found[name].int() if name == "topk_ids" else found[name].float()).cpu().numpy()
            for name in outputs
            if name in found
        }

    def _backward(self, batch: Batch, loss: Loss, temperature: float) -> dict[str, Tensor]:
        """Add one micro-batch's gradient; sums of its metrics (see `drift.merge`), each with its weight under
        ``name/weight``."""
        if self.network.head == "score":
            found = {"scores": self._scores(batch.rows)}
        else:
            found = self._trained_outputs(batch, loss, temperature)
        dtype = next(iter(found.values())).dtype
        own = {name: values if name == "scores" else batch.grid(values) for name, values in found.items()}
        columns = {**batch.columns(loss, dtype), **{name: own[name] for name in own if name in loss.reads}}
        try:
            numerator, metrics = loss.total(columns, batch.mask)
        except NodeError as error:  # it counts rows of this pass; the user knows them by their keys
            keys = batch.rows.keys
            error.found = re.sub(r"at row (\d+)", lambda found: f"at {keys[int(found[1])]}", str(error.found))
            raise
        if not numerator.requires_grad:
            raise NodeError(
                "the loss has no gradient: it does not depend on the model that is trained",
                found=f"{loss} of {', '.join(loss.reads)}",
                wanted=f"a loss that reads one of {', '.join(TRAINED)}, and does not detach it",
            )
        numerator.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            sums = drift(batch, {name: value.detach() for name, value in found.items()}, dtype)
            sums["loss"] = numerator.detach()
            for name, (total, count) in metrics.items():
                sums[name], sums[f"{name}/weight"] = total, count
        return sums

    def _trained_outputs(self, batch: Batch, loss: Loss, temperature: float) -> dict[str, Tensor]:
        """What the loss reads of the trained model, with a gradient, and what the metrics do."""
        outputs = {"logprobs", "entropy"}.union(name for name in TRAINED if name in loss.reads)
        at = _ids_of(batch, TOPK_IDS) if "topk_logprobs" in outputs else None
        gradient = "entropy" in loss.reads
        states = self._states(batch)
        return self._read(states, batch.target, at, temperature, outputs=outputs, entropy_gradient=gradient)

    def _states(self, batch: Batch) -> Tensor:
        """[wanted, width] states that predict the wanted tokens."""
        if batch.shared is None:
            return self.network.states(batch.ids, batch.row, batch.position)
        return self.network.shared_states(batch.shared, batch.row, batch.token)

    def _scores(self, rows: Rows) -> Tensor:
        """[rows] what a ``score`` head makes of each row's last token."""
        last = torch.from_numpy(_lengths(rows) - 1).to(self._device)
        ids = torch.from_numpy(sequences(rows)).to(self._device)
        return self.network.values(self.network.states(ids, torch.arange(len(rows)).to(last), last))

    def _read(
        self, states: Tensor, target: Tensor, at: Tensor | None, temperature: float, **wanted: Any
    ) -> dict[str, Tensor]:
        """What the head says of each wanted token (`read_logits`), in parts when all logits together are too many."""
        if self.network.head != "lm":
            return {"values": self.network.values(states)}

        def read(states: Tensor, target: Tensor, at: Tensor | None) -> dict[str, Tensor]:
            logits = scaled_logits(self.network.logits(states), temperature)
            return read_logits(logits, target, at, num_ids=self._num_ids, **wanted)

        size = max(1, LOGITS_NUMBERS // self.network.vocab_size)
        if len(target) <= size:
            return read(states, target, at)
        again = partial(checkpoint, read, use_reentrant=False) if torch.is_grad_enabled() else read
        cuts = [slice(start, start + size) for start in range(0, len(target), size)]
        parts = [again(states[cut], target[cut], None if at is None else at[cut]) for cut in cuts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _trained(self) -> Optimizer:
        if self.optimizer is None:
            raise BackendError(
                f"model '{self.model.name}' is frozen and cannot be trained",
                found="optimizer=None",
                fix="fl.Model(..., optimizer=fl.AdamW(lr=1e-6))",
            )
        return self.optimizer

    def _check_head(self, outputs: Sequence[str]) -> None:
        for name in outputs:
            if HEAD_OF[name] != self.network.head:
                raise BackendError(
                    f"model '{self.model.name}' does not compute '{name}'",
                    found=f"head='{self.network.head}'",
                    wanted=f"head='{HEAD_OF[name]}'",
                )


def _lengths(rows: Rows) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[rows] tokens of prompt and response."""
    lengths: np.ndarray[Any, np.dtype[np.int64]] = rows["prompt_ids"].lengths + rows["response_ids"].lengths
    return lengths


def _ids_of(batch: Batch, column: str) -> Tensor:
    """[wanted, k] int64."""
    return batch.flat(batch.column(column, torch.float32)).long()
