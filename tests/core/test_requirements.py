"""A7: an engine that cannot carry a policy is refused in a sentence that says what to change."""

import pytest

from schedloom import Policy
from schedloom.core.claims import QUEUE_ORDER, Claims
from schedloom.core.errors import ConfigurationError
from schedloom.core.requirements import check_requirements
from schedloom.core.wire import EngineContract, Role
from schedloom.policies.append_prefill import AppendPrefill


def engine(role: Role, prefix_caching: bool = True, scheduling_policy: str = "fcfs") -> EngineContract:
    return EngineContract(
        role=role,
        models=["m"],
        block_size=16,
        prefix_caching=prefix_caching,
        scheduling_policy=scheduling_policy,
    )


@pytest.mark.parametrize("role", [Role.CONSUMER, Role.BOTH])
def test_a_decoder_carries_append_prefill(role: Role) -> None:
    check_requirements([AppendPrefill()], engine(role))


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.NONE])
def test_another_role_is_refused(role: Role) -> None:
    with pytest.raises(ConfigurationError, match=f"role is '{role.value}'.*kv_consumer"):
        check_requirements([AppendPrefill()], engine(role))


def test_prefix_caching_off_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--enable-prefix-caching"):
        check_requirements([AppendPrefill()], engine(Role.CONSUMER, prefix_caching=False))


class OwnOrder(Policy):
    name = "own_order"
    claims = Claims(owns=frozenset({QUEUE_ORDER}))


def test_the_queue_has_one_order() -> None:
    check_requirements([OwnOrder()], engine(Role.CONSUMER))
    check_requirements([AppendPrefill()], engine(Role.CONSUMER, scheduling_policy="priority"))
    with pytest.raises(
        ConfigurationError, match="'own_order' decides the order of the waiting queue, and so does vLLM"
    ):
        check_requirements([OwnOrder()], engine(Role.CONSUMER, scheduling_policy="priority"))
