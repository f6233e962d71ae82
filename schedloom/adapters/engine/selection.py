"""Which scheduler class an engine gets.

vLLM asks for it in one place, ``SchedulerConfig.get_scheduler_cls``, which cannot see the rest of the configuration.
So the method is wrapped once per process, and what it returns decides when it is called with the configuration. What an
engine must be refused for is looked at once more, earlier, where the server builds its configuration: there the refusal
is the last line that an operator reads, and no engine process has been started for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedloom.adapters.engine.contract import describe_engine, share_engine_id
from schedloom.adapters.engine.settings import engine_section
from schedloom.core.composition import compose
from schedloom.core.config import SECTION
from schedloom.core.errors import ConfigurationError
from schedloom.core.requirements import check_queue_order, check_requirements

COMPOSABLE = "schedloom_composable"
"""A scheduler class that sets this attribute to true accepts schedloom's mixin before it."""

MARK = "wrapped_by_schedloom"

SchedulerClass = Callable[..., Any]


def install() -> None:
    """Wrap the two methods of vLLM's configuration, once per process."""
    from vllm.config.scheduler import SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs

    stock_class = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(self: Any) -> SchedulerClass:
        return _deciding_factory(stock_class(self), user_class=self.scheduler_cls is not None)

    stock_config = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *arguments: Any, **keywords: Any) -> Any:
        config = stock_config(self, *arguments, **keywords)
        share_engine_id(config)
        scheduler = config.scheduler_config
        scheduler_class(stock_class(scheduler), config, user_class=scheduler.scheduler_cls is not None)
        return config

    _wrap(SchedulerConfig, get_scheduler_cls)
    _wrap(EngineArgs, create_engine_config)


def _wrap(owner: type, replacement: Callable[..., Any]) -> None:
    name = replacement.__name__
    if not hasattr(getattr(owner, name), MARK):
        setattr(replacement, MARK, True)
        setattr(owner, name, replacement)


def _deciding_factory(base: SchedulerClass, user_class: bool) -> SchedulerClass:
    def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
        return scheduler_class(base, vllm_config, user_class)(vllm_config=vllm_config, **arguments)

    return make_scheduler


def scheduler_class(base: SchedulerClass, vllm_config: Any, user_class: bool = False) -> SchedulerClass:
    """``base`` itself when nothing is on, otherwise ``base`` composed with the configured policies.

    Raises ConfigurationError when the configuration, the engine or the scheduler class cannot carry them.
    """
    section = engine_section(vllm_config)
    if not section.is_on:
        return base
    if user_class and not getattr(base, COMPOSABLE, False):
        raise ConfigurationError(_refusal(base))
    policies = compose(section.choices, side="engine")
    check_requirements(policies.policies, describe_engine(vllm_config))
    from schedloom.adapters.engine.scheduler import composed

    check_queue_order(policies.policies, vllm_config.scheduler_config.policy)
    scheduler: SchedulerClass = composed(base, policies, section.transfer_peers)
    return scheduler


def _refusal(base: SchedulerClass) -> str:
    name = getattr(base, "__qualname__", repr(base))
    return (
        f"additional_config.{SECTION} switches schedloom policies on and --scheduler-cls names {name}: drop one of the "
        f"two, or set {COMPOSABLE} = True on the class if it keeps to vLLM's scheduler seams"
    )
