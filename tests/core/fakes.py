"""Stand-ins for installed policies."""

from collections.abc import Mapping

from schedloom import Policy
from schedloom.core.registry import Registry


class FakeRegistry(Registry):
    """Policies that no package brought."""

    def __init__(self, policies: Mapping[str, type[Policy]]) -> None:
        super().__init__([])
        self.policies = policies

    def load(self, name: str) -> type[Policy]:
        return self.policies[name]
