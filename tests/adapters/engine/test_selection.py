"""A4, A7, C4: which scheduler class an engine gets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from schedloom.adapters.engine import contract, selection, settings
from schedloom.adapters.engine.scheduler import PolicyScheduler
from schedloom.core.errors import ConfigurationError
from tests.adapters.engine.harness import make_scheduler, vllm_config

ON = {"scheduler_config": {"decoder_append_prefill_enable": True}}
OFF = {"scheduler_config": {"decoder_append_prefill_enable": False}}


class UsersOwn(Scheduler):
    """A scheduler named by --scheduler-cls."""


class ComposableUsersOwn(Scheduler):
    schedloom_composable = True


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    stock = SchedulerConfig.get_scheduler_cls, EngineArgs.create_engine_config
    selection.install()
    yield
    SchedulerConfig.get_scheduler_cls, EngineArgs.create_engine_config = stock


def build(model: Path, additional: dict[str, Any], user_class: type | None = None, **config: Any) -> Any:
    engine = vllm_config(model, additional=additional, **config)
    engine.scheduler_config.scheduler_cls = user_class
    return make_scheduler(engine.scheduler_config.get_scheduler_cls(), engine)


@pytest.mark.parametrize(
    "additional",
    [{}, OFF, {"other": 1}, {"scheduler_config": {"policies": [], "transfer_peers": []}}, {"scheduler_config": {}}],
)
def test_off_is_vllms_own_class(model: Path, asynchronous: bool, additional: dict[str, Any]) -> None:
    scheduler = build(model, additional, asynchronous=asynchronous)
    assert type(scheduler) is (AsyncScheduler if asynchronous else Scheduler)


@pytest.mark.parametrize("additional", [{}, OFF])
def test_off_leaves_the_users_class(model: Path, additional: dict[str, Any]) -> None:
    assert type(build(model, additional, UsersOwn)) is UsersOwn


def test_the_switch_alone_selects_the_matching_class(model: Path, asynchronous: bool) -> None:
    scheduler = build(model, ON, asynchronous=asynchronous)
    base = AsyncScheduler if asynchronous else Scheduler
    assert isinstance(scheduler, PolicyScheduler)
    assert isinstance(scheduler, base)
    assert isinstance(scheduler, AsyncScheduler) is asynchronous


def test_on_refuses_the_users_class(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="--scheduler-cls names UsersOwn: drop one of the two"):
        build(model, ON, UsersOwn)


def test_on_accepts_a_class_that_declares_itself_composable(model: Path) -> None:
    scheduler = build(model, ON, ComposableUsersOwn)
    assert isinstance(scheduler, PolicyScheduler)
    assert isinstance(scheduler, ComposableUsersOwn)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"role": "kv_producer"}, "role is 'producer'"),
        ({"role": None}, "role is 'none'"),
        ({"prefix_caching": False}, "--enable-prefix-caching"),
    ],
)
def test_an_engine_that_cannot_carry_the_policy_is_refused(model: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(model, ON, **config)


def test_a_server_is_refused_while_it_builds_its_configuration(model: Path) -> None:
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, enforce_eager=True, additional_config=ON)
    with pytest.raises(ConfigurationError, match="role is 'none'"):
        arguments.create_engine_config()


def test_installing_twice_wraps_once() -> None:
    once = SchedulerConfig.get_scheduler_cls
    selection.install()
    assert SchedulerConfig.get_scheduler_cls is once


def test_the_section_may_be_parked_in_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VARIABLE, '{"decoder_append_prefill_enable": true}')
    assert isinstance(build(model, {}), PolicyScheduler)


@pytest.mark.parametrize(
    ("parked", "additional", "message"),
    [
        ('{"decoder_append_prefill_enable": true}', ON, "keep one of the two"),
        ("yes", {}, "is not JSON"),
        ("[]", {}, "must be a JSON object"),
        ('{"policies": [], "policies": []}', {}, "is not JSON: key 'policies' stands twice"),
        ('{"polices": []}', {}, "did you mean 'policies'"),
    ],
)
def test_a_parked_section_must_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch, parked: str, additional: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv(settings.VARIABLE, parked)
    with pytest.raises(ConfigurationError, match=message):
        build(model, additional)


def test_a_routing_policy_has_no_place_in_an_engine(model: Path) -> None:
    section = {"scheduler_config": {"policies": [{"name": "session_owner"}]}}
    with pytest.raises(ConfigurationError, match="session_owner"):
        build(model, section)


def test_the_servers_of_one_engine_share_its_id(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM makes configurations for several: the process that starts the engine, then each server."""
    monkeypatch.setenv(contract.ENGINE_ID_VARIABLE, "of an engine before")
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}

    def engine_id(rank: int, count: int) -> Any:
        arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, enforce_eager=True)
        arguments.kv_transfer_config = KVTransferConfig(**transfer)
        arguments._api_process_rank, arguments._api_process_count = rank, count
        return arguments.create_engine_config().kv_transfer_config.engine_id

    engines = engine_id(-1, 2)
    assert [engine_id(0, 2), engine_id(1, 2)] == [engines] * 2
    assert len({engines, "of an engine before", engine_id(0, 1), engine_id(0, 1), engine_id(-1, 2)}) == 5
