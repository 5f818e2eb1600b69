"""The table of backends: what it names, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.errors import BackendError
from flowrl.runtime import registry
from flowrl.runtime.registry import available, load_backend, missing_packages


def test_a_backend_is_found_by_its_name() -> None:
    assert load_backend("tiny").__name__ == "TinyBackend"  # type: ignore[attr-defined]
    assert registry.describe("tiny", "tiny").vocab_size == 258
    assert {"hf", "tiny"} <= set(available())


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(BackendError, match=r"(?s)there is no backend 'megatorn'.*did you mean 'megatron'"):
        load_backend("megatorn")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ("torch", "no_such_engine.core")
    absent = registry.Entry(path="flowrl.backends.hf:HFBackend", describe="", needs=needs, extra="engine")
    monkeypatch.setitem(registry.BACKENDS, "engine", absent)
    with pytest.raises(BackendError) as error:
        load_backend("engine")
    assert str(error.value) == "backend 'engine' needs the no_such_engine package: pip install 'flowrl[engine]'"
    assert missing_packages("engine") == ("no_such_engine.core",)
    assert "engine" not in available()


def test_a_backend_that_is_not_shipped_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    later = registry.Entry(path="flowrl.backends.no_such_backend:Later", describe="", needs=("torch",))
    monkeypatch.setitem(registry.BACKENDS, "later", later)
    with pytest.raises(BackendError, match="backend 'later' is not part of this flowrl"):
        load_backend("later")


def test_the_table_and_a_description_load_no_torch() -> None:
    code = (
        "import sys; from flowrl.runtime.registry import available; available();"
        "from flowrl.runtime.registry import describe; describe('tiny', 'tiny'); import flowrl.backends.hf_source;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
