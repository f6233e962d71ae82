"""A7: an engine that cannot carry a policy is refused in a sentence that says what to change."""

import pytest

from schedloom.core.errors import ConfigurationError
from schedloom.core.requirements import check_requirements
from schedloom.core.wire import EngineContract, Role
from schedloom.policies.append_prefill import AppendPrefill
from schedloom.policies.offload_restore import OffloadRestore
from schedloom.policies.tpot_guard import TpotGuard


def engine(role: Role, prefix_caching: bool = True) -> EngineContract:
    return EngineContract(role=role, models=["m"], block_size=16, prefix_caching=prefix_caching)


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


def test_nothing_can_be_restored_without_a_store() -> None:
    with pytest.raises(ConfigurationError, match="name PreemptOffloadConnector in --kv-transfer-config"):
        check_requirements([OffloadRestore()], engine(Role.CONSUMER))


def test_an_engine_that_does_not_cut_prompts_has_nothing_to_meter() -> None:
    whole = engine(Role.NONE).model_copy(update={"chunked_prefill": False})
    with pytest.raises(ConfigurationError, match=r"'tpot_guard' cuts prompts into chunks.*--enable-chunked-prefill"):
        check_requirements([TpotGuard()], whole)
