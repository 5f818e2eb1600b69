"""Import a heavy package when it is first used, so that ``import flowrl`` stays light."""

from __future__ import annotations

import importlib
from types import ModuleType


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        value: object = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # found without a call from now on: losses and rows ask thousands of times a step
        return value


def lazy(name: str) -> ModuleType:
    """A stand-in for the module `name` that imports it at the first attribute."""
    return _LazyModule(name)
