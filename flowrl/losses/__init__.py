"""Loss functions: plain torch on [rows, tokens], one number a token, or on preferences one number a row.

Each is called on tensors, or on settings alone to declare a `flowrl.Loss`::

    losses.ppo_clip(clip_low=0.2, clip_high=0.28) - 0.005 * losses.entropy() + 0.01 * losses.kl(estimator="k3")

Masking and aggregation are not here: `Loss.total` replaces masked positions before a function sees them, and
`Loss.denominator` divides once. A function that looks along a row (GSPO, GMPO) names ``mask``. Only columns of the
model that is trained carry a gradient.
"""

from .constrained import ppo_lagrangian
from .covariance import clip_cov, high_covariance, kl_cov
from .distillation import distill
from .policy import cispo, dro, gmpo, gspo, policy_gradient, ppo_clip, sapo
from .preference import bradley_terry, dpo, kto, orpo, simpo
from .regularizers import entropy, kl
from .supervised import sft
from .trust_region import dppo_kl, dppo_tv
from .value import value_clip

__all__ = [
    "bradley_terry",
    "cispo",
    "clip_cov",
    "distill",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "entropy",
    "gmpo",
    "gspo",
    "high_covariance",
    "kl",
    "kl_cov",
    "kto",
    "orpo",
    "policy_gradient",
    "ppo_clip",
    "ppo_lagrangian",
    "sapo",
    "sft",
    "simpo",
    "value_clip",
]
