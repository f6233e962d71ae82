"""C3: what somebody writes down is never taken for something else."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from schedloom.adapters.engine.offload.settings import OffloadSettings
from schedloom.commands.documents import section_models
from schedloom.core.errors import complaints
from schedloom.core.registry import Registry
from schedloom.core.settings import StrictSettings


class Inner(StrictSettings):
    on: bool = False
    size: int = 1


class Settings(StrictSettings):
    size: int = 1
    seconds: float | None = None
    on: bool = False
    either: bool | int = 0
    version: Literal[1] = 1
    word: Annotated[str, Field(min_length=9)] = "as it should"
    sizes: tuple[int, ...] = ()
    shares: dict[str, float] | None = None
    inner: dict[str, Inner | str] | None = None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": True}, "size: must be a number, not True"),
        ({"seconds": False}, "seconds: must be a number, not False"),
        ({"version": True}, "version: must be a number, not True"),
        ({"on": 1}, "on: must be true or false, not 1"),
        ({"on": 0.0}, "on: must be true or false, not 0.0"),
        ({"on": "yes"}, "on: must be true or false, not 'yes'"),
        ({"on": "true"}, "on: must be true or false, not 'true'"),
        ({"sizes": [4, True]}, "sizes[1]: must be a number, not True"),
        ({"shares": {"a": True}}, "shares.a: must be a number, not True"),
        ({"seconds": float("inf")}, "seconds: must be a finite number, not inf"),
        ({"seconds": "nan"}, "seconds: must be a finite number"),
        ({"shares": {"a": float("-inf")}}, "shares.a: must be a finite number, not -inf"),
        ({"sise": 1}, "unknown key 'sise'; did you mean 'size'?"),
    ],
)
def test_nothing_is_taken_for_something_else(values: dict[str, Any], sentence: str) -> None:
    assert complaints_of(values) == [sentence]


def complaints_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate(values)
    return complaints(refused.value, Settings)


def test_a_model_beside_others_looks_after_its_own() -> None:
    assert "inner.a.on: must be true or false, not 1" in complaints_of({"inner": {"a": {"on": 1}}})


def test_all_complaints_are_told_together_and_each_once() -> None:
    assert complaints_of({"size": True, "on": 5, "sise": 1, "sizes": [True, "a"], "word": "{size}"}) == [
        "unknown key 'sise'; did you mean 'size'?",
        "size: must be a number, not True",
        "on: must be true or false, not 5",
        "sizes[0]: must be a number, not True",
        "word: must have at least 9 characters",
        "sizes[1]: must be a valid integer",
    ]


class Fixed(StrictSettings):
    kind: Literal["fixed"]
    seconds: float = 1.0


class Learnt(StrictSettings):
    kind: Literal["learnt"]
    half_life: float = 1.0


class Pace(StrictSettings):
    model: Annotated[Fixed | Learnt, Field(discriminator="kind")]


def test_one_of_several_models_may_be_chosen_by_a_key() -> None:
    assert Pace.model_validate({"model": {"kind": "learnt"}}).model == Learnt(kind="learnt")
    with pytest.raises(ValidationError) as refused:
        Pace.model_validate({"model": {"kind": "fixed", "seconds": True}})
    assert complaints(refused.value, Pace) == ["model.fixed.seconds: must be a number, not True"]


def test_what_was_meant_is_taken() -> None:
    written = {"size": "5", "seconds": 2, "on": True, "sizes": [4, 8], "inner": {"a": {"on": True}, "b": "c"}}
    settings = Settings.model_validate(written)
    assert (settings.size, settings.seconds, settings.on, settings.sizes) == (5, 2.0, True, (4, 8))
    assert settings.inner == {"a": Inner(on=True), "b": "c"}
    assert Settings(either=True).either is True and Settings(either=2).either == 2


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().size = 2


def strict_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    if model.model_config.get("extra") == "forbid":
        yield model
    for derived in model.__subclasses__():
        yield from strict_models(derived)


def test_all_settings_of_the_project_have_the_same_base() -> None:
    registry = Registry()
    policies = [registry.load(name).Settings for name in registry.names()]
    models: list[type[BaseModel]] = [*section_models().values(), OffloadSettings, *policies]
    for model in models:
        assert issubclass(model, StrictSettings), model
    ours = {model for model in strict_models(BaseModel) if model.__module__.startswith("schedloom.")}
    assert {model for model in ours if not issubclass(model, StrictSettings)} == set()
    assert len(ours) > len(policies)
