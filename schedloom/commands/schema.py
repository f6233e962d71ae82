"""JSON Schemas of the configurations, with the settings of every installed policy."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from schedloom.commands.documents import section_models
from schedloom.core.composition import PolicyChoice
from schedloom.core.hooks import Side, hooks_of, side_of
from schedloom.core.policy import Policy
from schedloom.core.registry import Registry

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(side: Side, registry: Registry) -> dict[str, Any]:
    """Raises ConfigurationError when an installed policy cannot be loaded."""
    policies = [registry.load(name) for name in registry.names()]
    entries = [_entry(policy) for policy in policies if side in map(side_of, hooks_of(policy))]
    section = section_models()[side]
    about: Any = Field(default=[], description=section.model_fields["policies"].description)
    policies_field: Any = (_list_of(entries), about)
    model = create_model(section.__name__, __base__=section, __doc__=section.__doc__, policies=policies_field)
    return {"$schema": _DIALECT, **model.model_json_schema(mode="validation")}


def _entry(policy: type[Policy]) -> type[BaseModel]:
    """One item of ``policies``: the policy's name, and its settings beside it."""
    named: Any = (Literal[policy.name], Field(description=PolicyChoice.model_fields["name"].description))
    return create_model(policy.__name__, __base__=policy.Settings, __doc__=policy.__doc__, name=named)


def _list_of(entries: list[type[BaseModel]]) -> Any:
    item: Any = reduce(or_, entries) if entries else PolicyChoice
    return GenericAlias(list, (Annotated[item, Field(discriminator="name")] if len(entries) > 1 else item,))
