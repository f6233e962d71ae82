"""C3: a wrong key or value is told with its whole path and the nearest known key, at every depth."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from schedloom.core.errors import explain, suggestion


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Bucket(Strict):
    size: Annotated[int, Field(ge=1)] = 1


class Fixed(Strict):
    kind: Literal["fixed"]
    seconds: float = 1.0


class Learnt(Strict):
    kind: Literal["learnt"]
    half_life: float = 1.0


class Named(Strict):
    name: Annotated[str, Field(min_length=2)]
    size: int = 1
    words: list[str] = []


class Settings(Strict):
    named: Annotated[list[Named], Field(min_length=1)] = []
    secret: Annotated[SecretStr | None, Field(min_length=8)] = None
    buckets: list[Bucket] = []
    by_tenant: dict[str, Bucket] = {}
    default: Bucket | None = None
    model: Annotated[Fixed | Learnt | None, Field(discriminator="kind")] = None
    even: int = 0

    @field_validator("even")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("write an even number")
        return value


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"bucket": []}, "unknown key 'at[1].bucket'; did you mean 'buckets'?"),
        ({"buckets": [{}, {"sizes": 1}]}, "unknown key 'at[1].buckets[1].sizes'; did you mean 'size'?"),
        ({"by_tenant": {"a": {"sizze": 1}}}, "unknown key 'at[1].by_tenant.a.sizze'; did you mean 'size'?"),
        ({"default": {"far": 1}}, "unknown key 'at[1].default.far'; known are: size"),
        ({"model": {"kind": "learnt", "half_lif": 1}}, "unknown key 'at[1].model.learnt.half_lif'; did you mean"),
        ({"buckets": [{"size": 0}]}, "at[1].buckets[0].size: must be greater than or equal to 1"),
        ({"even": 3}, "at[1].even: write an even number"),
        ({"model": {"kind": "fixed"}, "even": 1, "odd": 2}, "unknown key 'at[1].odd'; known are:"),
        ([], "at[1]: must be a mapping"),
        (
            {"named": ["a"]},
            'at[1].named[0]: must be a mapping; write {"name": "a"}, or with more, {"name": "a", "size": …',
        ),
        ({"named": [5]}, "at[1].named[0]: must be a mapping, not 5"),
        ({"buckets": ["a"]}, "at[1].buckets[0]: must be a mapping"),
        ({"buckets": {"a": 1}}, "at[1].buckets: must be a list; write [one, another]"),
        ({"named": "a"}, 'at[1].named: must be a list of mappings with name; write [{"name": "a"}]'),
        ({"named": {"name": "a"}}, 'at[1].named: must be a list of mappings with name; write [{"name": …}]'),
        ({"named": [{"name": "ab", "words": "a"}]}, "at[1].named[0].words: must be a list; write [one, another]"),
        ({"named": []}, "at[1].named: must have at least 1 item"),
        ({"named": [{"name": "a"}]}, "at[1].named[0].name: must have at least 2 characters"),
        ({"secret": "abc"}, "at[1].secret: must have at least 8 characters"),
        ({"even": "two"}, "at[1].even: must be a valid integer"),
    ],
)
def test_the_first_complaint_in_a_sentence(settings: object, sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate(settings)
    told = explain(refused.value, Settings, "at[1]")
    assert told.startswith(sentence)
    for raw in ("after validation", "instance of", "unable to"):
        assert raw not in told


def test_without_a_path_the_complaint_starts_at_the_key() -> None:
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate({"buckets": [{"sizes": 1}]})
    assert explain(refused.value, Settings) == "unknown key 'buckets[0].sizes'; did you mean 'size'?"


def test_a_word_of_one_known_name_alone_is_near_it() -> None:
    names = ["start_wait_seconds", "waiting_timeout_seconds", "port"]
    assert suggestion("wait", names) == "did you mean 'start_wait_seconds'?"
    assert suggestion("seconds", names) == f"known are: {', '.join(sorted(names))}"


def test_far_from_every_known_name_all_are_told() -> None:
    assert suggestion("zzz", ["b", "a"]) == "known are: a, b"
    assert suggestion("zzz", []) == "known are: none"
