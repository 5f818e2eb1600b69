import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import flowrl as fl
from flowrl.errors import ConfigError
from flowrl.runtime.config import apply, resolve
from flowrl.runtime.parameter_help import help_text

SHARED = fl.Mesh(dp=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When what happens."""

    warmup: int = 0
    """Steps."""
    kind: Literal["flat", "linear"] = "flat"
    inner: fl.AdamW = fl.AdamW(lr=0.5)


@fl.graph
def grpo(
    model: str = "model",
    batch_size: int = 8,
    learning_rate: float = 1e-6,
    temperature: float = 1.0,
    shuffle: bool = True,
    mode: Literal["sync", "async"] = "sync",
    stop: tuple[str, ...] = (),
    window: tuple[int, float] = (1, 2.0),
    limit: int | None = None,
    folder: Path = Path("data"),
    optimizer: fl.AdamW = fl.AdamW(lr=1e-6),
    critic: fl.Mesh | None = None,
    train: fl.Mesh = SHARED,
    generate: fl.Mesh = SHARED,
    score: fl.Mesh = fl.Mesh.cpu(4),
    schedule: Schedule = Schedule(),
    anything: Any = None,
    untyped=3,
):
    """Group-relative policy optimisation.

    Args:
        learning_rate: how far
            a step goes.
    """
    fl.prompts([{"prompt": "a"}], batch=1)


def refused(*arguments: str, yaml: str | None = None, folder: Path | None = None) -> ConfigError:
    file = None
    if yaml is not None:
        assert folder is not None
        file = folder / "settings.yaml"
        file.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        resolve(grpo, arguments, file)
    assert caught.value.exit_code == 2
    assert caught.value.found is not None
    assert caught.value.wanted is not None
    return caught.value


def read(text: str, folder: Path) -> dict[str, Any]:
    (folder / "settings.yaml").write_text(text)
    return resolve(grpo, [], folder / "settings.yaml")


def test_nothing_given_overrides_nothing() -> None:
    assert resolve(grpo) == {}
    assert apply(grpo, {}) == {}


def test_options_are_read_by_their_declared_types() -> None:
    words = (
        "--learning_rate 3e-6 --batch-size=16 --train.tp 2 --train.device cpu --no-shuffle --mode async --stop a b "
        "--window 3 0.5 --limit 7 --folder x --score.workers 2 --critic.dp 3 --model path --untyped 4 --anything text"
    )
    overrides = resolve(grpo, words.split())
    assert overrides == {
        "learning_rate": 3e-6,
        "batch_size": 16,
        "train": {"tp": 2, "device": "cpu"},
        "shuffle": False,
        "mode": "async",
        "stop": ["a", "b"],
        "window": [3, 0.5],
        "limit": 7,
        "folder": "x",
        "score": {"workers": 2},
        "critic": {"dp": 3},
        "model": "path",
        "untyped": 4,
        "anything": "text",
    }
    assert json.loads(json.dumps(overrides)) == overrides


def test_overrides_become_objects_that_keep_the_fields_they_do_not_name() -> None:
    built = apply(grpo, {"train": {"tp": 2}, "stop": ["a"], "folder": "x", "schedule": {"inner": {"eps": 1e-3}}})
    assert (built["train"].dp, built["train"].tp) == (2, 2)
    assert built["stop"] == ("a",)
    assert built["folder"] == Path("x")
    assert built["schedule"] == Schedule(inner=fl.AdamW(lr=0.5, eps=1e-3))


def test_a_mesh_shared_by_two_parameters_stays_one_unless_it_is_overridden() -> None:
    untouched = grpo(**apply(grpo, resolve(grpo, ["--learning_rate", "1"])))
    assert untouched.parameters["train"] is untouched.parameters["generate"]
    split = grpo(**apply(grpo, resolve(grpo, ["--train.tp", "2"])))
    assert split.parameters["train"] is not split.parameters["generate"]


def test_the_command_line_goes_before_the_file_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("learning_rate: 1e-5\ntrain: {dp: 4, tp: 2}\nlimit: null\n")
    overrides = resolve(grpo, ["--train.dp", "8"], file)
    assert overrides == {"learning_rate": 1e-5, "train": {"dp": 8, "tp": 2}, "limit": None}


def test_scalars_of_a_file_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    text = "learning_rate: 1e-6\nmodel: on\nbatch_size: 010\nstop: [yes, '1', 12:30:00]\ntemperature: 1\n"
    assert read(text, tmp_path) == {
        "learning_rate": 1e-6,
        "model": "on",
        "batch_size": 10,
        "stop": ["yes", "1", "12:30:00"],
        "temperature": 1,
    }
    assert type(apply(grpo, {"temperature": 1})["temperature"]) is float


def test_a_misspelt_key_names_the_nearest_one_and_its_line(tmp_path: Path) -> None:
    error = refused(yaml="batch_size: 4\nlearing_rate: 1e-6\n", folder=tmp_path)
    assert "graph 'grpo' has no parameter 'learing_rate'" in error.problem
    assert error.at is not None
    assert error.at.line == 2
    assert error.fix == "did you mean 'learning_rate'?"


def test_a_key_of_another_section_says_where_it_belongs(tmp_path: Path) -> None:
    error = refused(yaml="lr: 1e-6\n", folder=tmp_path)
    assert error.fix == ("'lr' belongs under 'optimizer' or under 'schedule.inner': optimizer.lr or schedule.inner.lr")
    error = refused("--train.mode", "async")
    assert "section 'train' of graph 'grpo' has no parameter 'mode'" in error.problem
    assert error.fix == "'mode' belongs at the top level: --mode"


def test_a_text_for_a_number_is_refused(tmp_path: Path) -> None:
    error = refused(yaml='temperature: "0.6"\n', folder=tmp_path)
    assert "parameter 'temperature' of graph 'grpo' has the wrong type" in error.problem
    assert (error.found, error.wanted, error.fix) == ("'0.6'", "float", "write 0.6 without quotes")
    assert refused(yaml="temperature: warm\n", folder=tmp_path).fix == "give it as float"


def test_a_float_for_an_integer_is_refused(tmp_path: Path) -> None:
    error = refused(yaml="batch_size: 8.0\n", folder=tmp_path)
    assert (error.found, error.wanted, error.fix) == ("8.0", "int", "write 8")
    assert refused("--batch_size", "8.0").fix == "write 8"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("batch_size: true", "int"),
        ("shuffle: 1", "bool"),
        ("shuffle: 'true'", "bool"),
        ("model: 3", "str"),
        ("mode: slow", "'sync' | 'async'"),
        ("stop: a", "tuple[str, ...]"),
        ("stop: [1]", "str"),
        ("window: [1]", "2 values: tuple[int, float]"),
        ("temperature: .nan", "float"),
        ("limit: 1.5", "int | None"),
        ("train: {dp: '2'}", "int"),
    ],
)
def test_a_value_of_another_type_is_refused(text: str, wanted: str, tmp_path: Path) -> None:
    assert refused(yaml=text, folder=tmp_path).wanted == wanted


def test_a_misspelt_field_of_a_section_names_the_section() -> None:
    error = refused("--optimizer.lrr", "1")
    assert "section 'optimizer' of graph 'grpo' has no parameter 'lrr'" in error.problem
    assert error.fix == "did you mean '--optimizer.lr'?"


def test_an_option_of_another_program_is_an_unknown_key() -> None:
    assert "has no parameter 'set'" in refused("--set", "update.lrr=1").problem


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    error = refused(yaml="train:\n  dp: 1\n  dp: 2\n", folder=tmp_path)
    assert "key 'train.dp' is given twice" in error.problem
    assert error.found == "lines 2 and 3"
    assert "option '--mode' is given twice" in refused("--mode", "sync", "--mode", "async").problem


def test_a_section_is_no_value(tmp_path: Path) -> None:
    assert "parameter 'train' of graph 'grpo' is a section" in refused("--train", "2").problem
    assert "is a section" in refused(yaml="critic: 2", folder=tmp_path).problem
    assert resolve(grpo, ["--critic", "none"]) == {"critic": None}


def test_an_option_without_a_value_or_a_value_without_an_option_is_refused() -> None:
    assert "option '--mode' needs a value" in refused("--mode").problem
    assert "argument 'extra' belongs to no parameter" in refused("--mode", "sync", "extra").problem
    assert resolve(grpo, ["--shuffle", "--mode", "sync"]) == {"shuffle": True, "mode": "sync"}
    assert "option '--no-shuffle' takes no value" in refused("--no-shuffle", "true").problem


def test_what_a_dataclass_refuses_is_told_with_its_parameter(tmp_path: Path) -> None:
    assert "parameter 'train' of graph 'grpo': mesh axis 'dp' is not a count" in refused("--train.dp", "0").problem
    error = refused(yaml="model: a\nscore:\n  dp: 2\n", folder=tmp_path)
    assert "parameter 'score' of graph 'grpo': a mesh is either CPU workers or model ranks" in error.problem
    assert error.at is not None
    assert error.at.line == 2


def test_a_new_dataclass_needs_its_required_fields() -> None:
    @fl.graph
    def other(optimizer: fl.AdamW | None = None):
        fl.prompts([{"prompt": "a"}], batch=1)

    with pytest.raises(ConfigError, match="a new AdamW needs a value for 'lr'"):
        resolve(other, ["--optimizer.eps", "1e-3"])
    assert apply(other, resolve(other, ["--optimizer.lr", "1"])) == {"optimizer": fl.AdamW(lr=1.0)}


def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    assert "not YAML" in refused(yaml="mode: [sync\ntrain: 2", folder=tmp_path).problem
    assert "a settings file is a map" in refused(yaml="- 1\n", folder=tmp_path).problem
    assert "a key is no name" in refused(yaml="1: 2\n", folder=tmp_path).problem
    assert read("", tmp_path) == {}
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(grpo, [], tmp_path / "none.yaml")


def test_help_lists_types_defaults_and_docstrings() -> None:
    text = help_text(grpo)
    assert "--learning_rate float" in text
    assert "default 1e-06. how far a step goes" in text
    assert "--mode 'sync' | 'async'" in text
    assert "score: Mesh, default Mesh(workers=4)" in text
    assert "--train.tp int" in text
    assert "Tensor-parallel ranks of one replica" in text
    assert "--optimizer.lr float" in text
