"""The contract between the runtime and whatever runs a model: the only seam between the two.

The runtime makes one `Backend` a model and rank, by the table in `runtime/registry.py`. A backend knows its ranks, its
memory and its numerics; it knows nothing of graphs, queues or schedules. All sums that it reports are *unnormalised*:
the caller divides once, over the whole mini-batch and all data-parallel ranks, so that micro-batch split, padding and
dp size cannot change a result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from .rows import Key, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from .loss import Loss
    from .model import Head, Model

StopReason = Literal["eos", "length", "stop_string"]
Output = Literal["logprobs", "entropy", "logit_energy", "topk_ids", "topk_logprobs", "values", "scores"]

HEAD_OF: Mapping[str, Head] = {
    "logprobs": "lm",
    "entropy": "lm",
    "logit_energy": "lm",
    "topk_ids": "lm",
    "topk_logprobs": "lm",
    "values": "value",
    "scores": "score",
}
"""The head that computes each output."""


class Sum(NamedTuple):
    """A metric as a sum and the weight that it is to be divided by; the two add up over micro-batches and ranks."""

    total: float
    weight: float

    @property
    def mean(self) -> float:
        """``total / weight``; nan when nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")

    @property
    def value(self) -> float | None:
        """The mean; None when nothing was counted."""
        return self.mean if self.weight else None

    def __add__(self, other: object) -> Sum:
        assert isinstance(other, Sum)
        return Sum(self.total + other.total, self.weight + other.weight)


class Max(NamedTuple):
    """A metric as the largest of some numbers; two together are the larger."""

    value: float

    def __add__(self, other: object) -> Max:
        assert isinstance(other, Max)
        return max(self, other)


class EffectiveShare(NamedTuple):
    """Importance weights w as the share of their number that they are worth: ``(sum w)^2 / (n * sum w^2)``.

    The effective sample size (Kong 1992) over the sample size: 1 when all weights are equal, 1/n when one has all of
    it. The parts add up, so that the share of several together is exact.
    """

    total: float
    squares: float
    number: float

    @property
    def value(self) -> float | None:
        """The share, in (0, 1]; None when nothing was counted."""
        return self.total**2 / (self.number * self.squares) if self.number else None

    def __add__(self, other: object) -> EffectiveShare:
        assert isinstance(other, EffectiveShare)
        return EffectiveShare(self.total + other.total, self.squares + other.squares, self.number + other.number)


Metric = Sum | Max | EffectiveShare
"""What adds up over micro-batches, passes and ranks, and only then becomes a number: its ``value``."""
Metrics = dict[str, Metric]
"""By name. A plain number is ``Sum(value, 1)``."""


def metric_of(parts: Sequence[float]) -> Metric:
    """A metric from its parts, as a message carries them: each kind has its own number of them."""
    return Max(*parts) if len(parts) == 1 else Sum(*parts) if len(parts) == 2 else EffectiveShare(*parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a rollout samples."""

    n: int = 1
    """Responses to each prompt."""
    greedy: int = 0
    """Responses beside those that take the most likely token each time: the baselines of ReMax. They come last."""
    max_new_tokens: int = 64
    """Longest response, in tokens; the one that ends a response counts."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities add up to this."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep the tokens that are at least this share as likely as the most likely one; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response once they are part of its text."""
    ignore_eos: bool = False
    """Sample to `max_new_tokens` whatever is sampled."""

    @property
    def group_size(self) -> int:
        """All responses to a prompt."""
        return self.n + self.greedy


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a rollout answers."""

    key: Key
    """``sample`` is -1; or a sample's number, to go on with that sample."""
    ids: Sequence[int]
    """Token ids; special tokens included."""
    max_new_tokens: int | None = None
    """Longest response to it; None takes the sampling's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What a model answered, as the engine recorded it; nothing is inferred from text or padding later."""

    key: Key
    """The prompt's key with the sample's number."""
    ids: list[int]
    """[tokens] sampled ids, the end-of-sequence token included when it was sampled."""
    logprobs: list[float]
    """[tokens] log-probability of each id at the sampling temperature, over the full vocabulary."""
    stop: StopReason
    """Why it ended."""
    version: int
    """The weights' version that sampled it."""


class Tokenizer(Protocol):
    """Text to ids and back; one owner for special tokens."""

    eos_ids: frozenset[int]
    """Every id that ends a response: the tokenizer's, the configuration's and the generation configuration's."""
    eos_id: int | None
    """The one that is put behind a given answer: the tokenizer's own; None where there is none."""
    num_ids: int
    """Ids below it mean something; a model's vocabulary may be padded beyond."""

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a text, or of chat messages through the chat template; never two beginning-of-sequence tokens."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text without any special token."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        behind: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of chat messages through the chat template.

        Args:
            generation_prompt: up to where the assistant is to answer, or as they stand.
            behind: the first of them, whose ids (with a generation prompt) stay what they are where the text of all
                continues theirs, even if a token would span the border.
        """
        ...

    def written(self, messages: Sequence[Mapping[str, Any]]) -> list[bool] | None:
        """For each id of ``encode_chat(messages, generation_prompt=False)`` whether the assistant wrote it, by marks in
        the chat template; None for a template without marks."""
        ...

    def encode_reply(
        self,
        prompt: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        turns: Sequence[Mapping[str, Any]],
        response_ids: Sequence[int],
    ) -> list[int]:
        """Ids that lead a chat from what was sampled to the model's next turn, through the chat template.

        Args:
            prompt: the messages that the model was given, and
            prompt_ids: their ids.
            turns: the messages of the response so far, and the reply that is to follow.
            response_ids: ids of the response so far, without the reply.

        Returns:
            Ids that follow them: all together are the template's rendering of all messages, with the start of a turn.

        Raises:
            TemplateError: the template renders the messages before the reply otherwise than the ids have them.
        """
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of a response; special tokens are left out unless `special`."""
        ...


class Ranks(Protocol):
    """Where this process stands in its mesh."""

    @property
    def rank(self) -> int:
        """Of all ranks of the mesh."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        ...

    @property
    def dp_rank(self) -> int:
        """Its replica."""
        ...

    @property
    def dp_size(self) -> int:
        """Replicas of the mesh."""
        ...


class Backend(Protocol):
    """One model on one rank."""

    version: int
    """Version of the weights that are loaded; `publish`, `import_weights` and `load` change it."""
    tokenizer: Tokenizer

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[Sequence[Response]]:
        """Answer each prompt `sampling.group_size` times; yield, with each decoding step, the responses that it ends.

        A prompt whose key has a sample's number is answered once, under that key: the sample goes on. A step that ends
        none yields nothing but a sign of life: an empty sequence.

        A response is a function of weights, prompt ids, sampling, `seed` and its key: it does not depend on which
        others share its batch, nor on their order.
        """
        ...

    def forward(self, rows: Rows, outputs: Sequence[Output], temperature: float, k: int = 0) -> Rows:
        """Per-token outputs of the response tokens, without a gradient.

        Args:
            rows: columns ``prompt_ids`` and ``response_ids``; with a column ``topk_ids`` [response tokens, k] the
                outputs ``topk_ids`` and ``topk_logprobs`` are about these ids, not about the most likely ones.
            outputs: which columns to return. ``logit_energy`` is the squared norm of the gradient of a token's log-prob
                with respect to the logits.
            temperature: divides the logits before the log-probs.
            k: how many of the most likely ids ``topk_ids`` and ``topk_logprobs`` are about, the likeliest first.

        Returns:
            The same keys with one ragged column an output: float32 [response tokens]; int32 and float32 [response
            tokens, k] for ``topk_ids`` and ``topk_logprobs`` (over the full vocabulary); ``scores`` are one number a
            row.

        Raises:
            NodeError: an id of ``topk_ids`` is none of this model, or it has no k tokens.
        """
        ...

    def backward(self, rows: Rows, loss: Loss, temperature: float, max_tokens: int | None) -> Metrics:
        """Add the gradient of the loss's unnormalised sum over `rows`.

        Args:
            rows: ``prompt_ids``, ``response_ids``, ``mask`` and every other column that the loss reads; all rows of a
                prompt together when it couples them, and then they share a forward pass; for one that reads
                ``topk_logprobs``, the trained model's log-probs at some ids, also these: ``teacher_ids``. Where a
                sampler of this model made the rows, ``sampler_logprobs`` too, while the weights are those that the
                update begins with.
            loss: what to differentiate.
            temperature: divides the logits before the log-probs.
            max_tokens: most padded tokens (rows x longest) in one forward pass, where what may not be parted is no
                more; None for all rows at once.

        Returns:
            Sums. The totals of ``"tokens"`` and ``"rows"`` count trained tokens and the rows that have one, of rows
            that the loss is about (`Loss.select`; ``"left_out"`` is the share of the others): over the whole
            mini-batch they make the denominator (`Loss.denominator`). ``"loss"`` is the unnormalised sum under
            the weight of its own denominator; ``"kl"``, ``"entropy"`` and the rest are sums over trained tokens. With
            ``ref_logprobs``, ``"kl"`` is that of the trained model from the reference, and coefficients follow it. With
            ``sampler_logprobs``, of the ratio of the model to its sampler: ``"mismatch_kl"`` (k3), ``"max_ratio"`` and
            ``"ess"``, an `EffectiveShare`.

        Raises:
            NodeError: a trained token has a loss that is not finite.
        """
        ...

    def step(self, denominator: float, clip_grad: float | None = None) -> Metrics:
        """Sum the gradients over dp, divide by `denominator`, clip to the norm `clip_grad`, optimise, forget them.

        Every rank of the mesh calls it together. `denominator` is the sum over the whole mini-batch and all ranks; 0
        means that nothing was trained: weights and optimizer are left bit-identical. The version does not change here.

        Args:
            denominator: what `Loss.denominator` gives.
            clip_grad: largest global norm of the divided gradients; None does not clip.

        Returns:
            ``grad_norm`` before clipping, ``lr``, and ``skipped`` (1 when nothing was trained).

        Raises:
            NodeError: the norm is not finite; nothing is changed then.
        """
        ...

    def publish(self, version: int) -> None:
        """Name the weights as they are now."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The complete state: canonical (Hugging Face) names, full tensors, tied pairs once."""
        ...

    def import_weights(self, tensors: Mapping[str, Tensor], version: int) -> str:
        """Replace the complete state, and return its checksum (`weights_checksum`).

        Raises:
            BackendError: a name is missing or left over, or a shape or dtype differs; nothing is changed then.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write model, optimizer and schedule; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; every rank calls it."""
        ...


class BackendFactory(Protocol):
    """What `runtime/registry.py` names for each backend, beside a function of `ModelFacts`; usually its class."""

    def __call__(self, model: Model, ranks: Ranks, device: str) -> Backend:
        """Load a model's weights for one rank; `torch.distributed` is set up already when ``world_size > 1``."""
        ...

    def load_tokenizer(self, source: str) -> Tokenizer:
        """The tokenizer of a model, without its weights."""
        ...


def _no_vocabulary() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a model's configuration file says, which the checks need before weights or torch are loaded."""

    max_length: int | None
    """Longest sequence in tokens; None when the file does not say."""
    num_heads: int | None
    num_layers: int | None
    vocab_size: int | None
    vocabulary: Callable[[], Mapping[str, int] | None] = _no_vocabulary
    """Reads the id of every token from the tokenizer's file; None when there is none that says so. It is large."""
