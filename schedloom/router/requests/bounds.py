"""How much of a model's output a request may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from schedloom.router.failures import Failure

if TYPE_CHECKING:
    from schedloom.router.requests.body import GenerationBody

Fields = Mapping[str, Any]

MAX_CHOICES: Final = 128

_TOKENS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Where each endpoint is told how many tokens to make at most; the first that is there counts."""

_LEAST_TOKENS = "min_tokens"
_CHOICES = ("n", "best_of")
_MAKES_FEW = "/v1/completions"
"""Where engines make 16 tokens unless they are told how many; elsewhere as many as the model has room for."""


class Bounds(NamedTuple):
    """Of one request. Who names no number of tokens is given ``default_tokens``, without which ``max_tokens`` stands
    in where engines would have no bound.
    """

    max_tokens: int | None = None
    default_tokens: int | None = None
    max_choices: int = MAX_CHOICES


class OutputBounds:
    """Those of one endpoint. ``hold`` is for requests of several choices, and where ``are_of_tokens`` for all."""

    def __init__(self, path: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._keys = _TOKENS.get(path, ())
        self._if_null = bounds.default_tokens or bounds.max_tokens
        self._if_absent = bounds.default_tokens if path == _MAKES_FEW else self._if_null
        self.are_of_tokens = bool(self._keys and self._if_null)

    def hold(self, body: GenerationBody) -> None:
        """Name a number of tokens where the client does not. Raises Failure (400) for what is out of bounds."""
        if not body.splittable:
            self._check_choices(body.fields)
        if self.are_of_tokens:
            self._check_tokens(body)

    def _check_choices(self, fields: Fields) -> None:
        for key in _CHOICES:
            if fields.get(key) is not None:
                _check(key, fields[key], 1, self._bounds.max_choices)

    def _check_tokens(self, body: GenerationBody) -> None:
        fields, most = body.fields, self._bounds.max_tokens
        named = [key for key in (*self._keys, _LEAST_TOKENS) if fields.get(key) is not None]
        if most is not None:
            for key in named:
                _check(key, fields[key], 0, most)
        if not set(named).intersection(self._keys):
            self._name_tokens(body)

    def _name_tokens(self, body: GenerationBody) -> None:
        given = self._if_null if self._keys[0] in body.fields else self._if_absent
        if given is not None:
            least = body.fields.get(_LEAST_TOKENS)
            body.name(self._keys[0], max(given, least) if isinstance(least, int) else given)


def _check(key: str, value: Any, least: int, most: int) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    if not (is_number and least <= value <= most):
        raise Failure.own(400, f"{key} must be a whole number from {least} to {most}.", "invalid_value", key)
