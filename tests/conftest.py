"""Options of the whole test suite; pytest reads them only from here, whichever folder is asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # the tests of a device do without it
    import hypothesis

    hypothesis.settings.register_profile("flowrl", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("flowrl")

SHIPPED = Path(__file__).parent / "vectors" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``pytest tests/vectors --vectors DIR`` run other vectors in the same form."""
    parser.addoption("--vectors", type=Path, default=SHIPPED, metavar="DIR", help="folder of vectors/*.json to check")
