"""The base of all settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

if TYPE_CHECKING:
    from pydantic.functional_validators import ModelWrapValidatorHandler
    from typing_extensions import Self

_NO_NUMBER: Final = PydanticCustomError("number_type", "Input should be a number")
_NO_BOOLEAN: Final = PydanticCustomError("bool_type", "Input should be true or false")

_Location = tuple[int | str, ...]


class StrictSettings(BaseModel):
    """What somebody writes down is never taken for something else: unknown keys are refused, and so are infinite
    numbers, booleans in the place of numbers (a ``yes`` of YAML is one) and numbers or words in that of booleans. A
    docstring under a field describes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _tell_numbers_from_booleans(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        mistaken = list(cls._mistaken(values)) if isinstance(values, Mapping) else []
        if not mistaken:
            return handler(values)
        places = {found["loc"] for found in mistaken}
        try:
            handler(values)
        except ValidationError as error:
            mistaken += [_again(found) for found in error.errors() if found["loc"] not in places]
        raise ValidationError.from_exception_data(cls.__name__, mistaken)

    @classmethod
    def _mistaken(cls, values: Mapping[Any, Any]) -> Iterator[InitErrorDetails]:
        for key, field in cls.model_fields.items():
            if key in values:
                yield from _mistaken(values[key], list(_types_in(field.annotation)), (key,))


def _again(found: ErrorDetails) -> InitErrorDetails:
    error = PydanticCustomError(found["type"], found["msg"], found.get("ctx"))
    return {"type": error, "loc": found["loc"], "input": found["input"]}


def _types_in(annotation: Any) -> Iterator[type]:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        yield from map(type, arguments)
    elif isinstance(annotation, type) and not arguments:
        yield annotation
    else:
        for argument in arguments:
            yield from _types_in(argument)


def _mistaken(value: Any, expected: list[type], location: _Location) -> Iterator[InitErrorDetails]:
    """Every number and boolean within ``value`` that stands where only the other is ``expected``, and every word that
    stands where only a boolean is.
    """
    numbers = any(issubclass(one, int | float) and one is not bool for one in expected)
    if isinstance(value, bool) and numbers and bool not in expected:
        yield {"type": _NO_NUMBER, "loc": location, "input": value}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_word = isinstance(value, str) and not any(issubclass(one, str) for one in expected)
    if (is_number or is_word) and bool in expected and not numbers:
        yield {"type": _NO_BOOLEAN, "loc": location, "input": value}
    for key, item in _items_of(value, expected):
        yield from _mistaken(item, expected, (*location, key))


def _items_of(value: Any, expected: list[type]) -> Iterator[tuple[int | str, Any]]:
    """What is within ``value``, unless it may be a model: that looks after its own."""
    if isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, Mapping) and not any(issubclass(one, BaseModel) for one in expected):
        yield from value.items()
