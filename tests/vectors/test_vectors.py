"""Estimators, losses, KL and corrections against an independent implementation, in float64.

``pytest tests/vectors --vectors DIR`` runs other vectors of the same form.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Absolute, as the vectors say."""


def _load_adapters() -> Any:
    # With importlib import mode a test's folder is not on the path.
    spec = importlib.util.spec_from_file_location("vector_adapters", Path(__file__).parent / "adapters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


adapters = _load_adapters()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of each file."""
    folder: Path = metafunc.config.getoption("--vectors")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise pytest.UsageError(f"--vectors {folder}: no *.json there")
    found = [(file.stem, case) for file in files for case in json.loads(file.read_text())["cases"]]
    metafunc.parametrize(("family", "case"), found, ids=[_name(family, case) for family, case in found])


def test_agrees_with_the_vector(family: str, case: Mapping[str, Any]) -> None:
    adapter = adapters.adapter_for(family, case["case"])
    if adapter is None:
        pytest.skip(f"no adapter for {family}/{case['case']}")
    given = {name: _tensor(name, value) for name, value in case["inputs"].items()}
    produced = adapter(given, dict(case["params"]))
    missing = set(case["outputs"]) - set(produced)
    assert not missing, f"{family}/{case['case']}: nothing to compare with the outputs {', '.join(sorted(missing))}"
    for name, wanted in case["outputs"].items():
        _assert_equal(name, produced[name], torch.tensor(wanted, dtype=torch.float64), given.get("mask"))


def _assert_equal(name: str, found: Any, wanted: Tensor, mask: Tensor | None) -> None:
    found = torch.as_tensor(found, dtype=torch.float64 if isinstance(found, float) else None)
    assert found.dtype == torch.float64, f"{name} is {found.dtype}"
    assert found.shape == wanted.shape, f"{name} is {list(found.shape)}, the vector's is {list(wanted.shape)}"
    apart = (found - wanted).abs()
    if mask is not None and mask.shape == apart.shape:
        apart = apart[mask]
    worst = float(apart.max()) if apart.numel() else 0.0
    assert worst <= TOLERANCE, f"{name} differs by up to {worst:.3g}"


def _tensor(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    kinds = {"mask": torch.bool, "group": torch.int64}
    return tensor.to(kinds.get(name, torch.float64))


def _name(family: str, case: Mapping[str, Any]) -> str:
    settings = "".join(f"-{name}={value}" for name, value in case["params"].items())
    return f"{family}/{case['case']}-seed={case['seed']}{settings}"
