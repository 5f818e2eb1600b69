"""The table of backends: what ``fl.Model(..., backend=NAME)`` names. Each is imported when it is first asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import cast

from flowrl.backend import BackendFactory, ModelFacts
from flowrl.errors import BackendError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a backend is, and what it needs."""

    path: str
    """``module:Class``."""
    describe: str
    """``module:function`` of `ModelFacts`, which loads no more than a configuration file needs."""
    needs: tuple[str, ...]
    """Packages, by their import names."""
    extra: str | None = None
    """The extra of flowrl that installs them; None when flowrl itself does."""


_HF, _TINY = "flowrl.backends.hf_source:describe", "flowrl.backends.tiny_source:describe"
_TORCH, _TRANSFORMERS = ("torch",), ("torch", "transformers")

BACKENDS = {
    "hf": Entry(path="flowrl.backends.hf:HFBackend", describe=_HF, needs=_TRANSFORMERS),
    "tiny": Entry(path="flowrl.backends.tiny:TinyBackend", describe=_TINY, needs=_TORCH),
    "fsdp": Entry(path="flowrl.backends.fsdp:FSDPBackend", describe=_HF, needs=_TRANSFORMERS),
    "megatron": Entry(
        path="flowrl.backends.megatron:MegatronBackend", describe=_HF, needs=("megatron.core",), extra="megatron"
    ),
    "vllm": Entry(path="flowrl.backends.vllm:VLLMBackend", describe=_HF, needs=("vllm",), extra="vllm"),
}


def load_backend(name: str) -> BackendFactory:
    """The backend of a name; never another one in its place.

    Raises:
        BackendError: nobody has that name, a package is missing, or this flowrl was built without it.
    """
    module, attribute = _installed(name).path.split(":")
    return cast(BackendFactory, getattr(importlib.import_module(module), attribute))


def describe(name: str, source: str) -> ModelFacts:
    """What a model's configuration says, without loading its backend.

    Raises:
        BackendError: as `load_backend`, or there is no such model.
    """
    module, function = _installed(name).describe.split(":")
    return cast(ModelFacts, getattr(importlib.import_module(module), function)(source))


def _installed(name: str) -> Entry:
    entry = _entry(name)
    if not is_shipped(name):  # asked first: nobody is to install a package in vain
        raise BackendError(
            f"backend '{name}' is not part of this flowrl",
            found=f"no module {entry.path.partition(':')[0]}",
            wanted=" or ".join(repr(one) for one in available()),
        )
    missing = missing_packages(name)
    if missing:
        package = missing[0].partition(".")[0]
        wanted = f"flowrl[{entry.extra}]" if entry.extra else "flowrl"
        raise BackendError(f"backend '{name}' needs the {package} package: pip install '{wanted}'")
    return entry


def available() -> tuple[str, ...]:
    """Names of the backends that can be loaded here."""
    return tuple(name for name in BACKENDS if is_shipped(name) and not missing_packages(name))


def is_shipped(name: str) -> bool:
    """Whether this flowrl has the module of a backend.

    Raises:
        BackendError: nobody has that name.
    """
    return _exists(_entry(name).path.partition(":")[0])


def missing_packages(name: str) -> tuple[str, ...]:
    """Packages that a backend needs and that are not installed; nothing is imported but their parents.

    Raises:
        BackendError: nobody has that name.
    """
    return tuple(package for package in _entry(name).needs if not _exists(package))


def _entry(name: str) -> Entry:
    if name not in BACKENDS:
        raise BackendError(
            f"there is no backend '{name}'",
            found=repr(name),
            wanted=", ".join(BACKENDS),
            fix=did_you_mean(name, BACKENDS),
        )
    return BACKENDS[name]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False
