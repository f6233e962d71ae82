"""The separate distribution that lets vLLM serve from a CPU."""

import os
import subprocess
import sys
from importlib.metadata import requires
from types import SimpleNamespace
from typing import Any

import nixl
import pytest
import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from schedloom_cpu_engine import check, collectives, plugin


def test_triton_finds_the_backend_by_its_entry_point() -> None:
    assert backends["cpu"].compiler.supports_target(GPUTarget("cpu", 0, 1))
    assert not backends["cpu"].compiler.supports_target(GPUTarget("cuda", 90, 32))


def test_the_driver_is_active_only_while_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not backends["cpu"].driver.is_active()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends["cpu"].driver.is_active()
    assert str(backends["cpu"].driver().get_active_torch_device()) == "cpu"


def test_compiling_a_kernel_is_refused_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        backends["cpu"].compiler(GPUTarget("cpu", 0, 1)).add_stages({}, None, None)


def test_every_nixl_agent_pauses_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    bindings = nixl._api.nixlBind
    monkeypatch.setattr(bindings, "nixlAgent", lambda name, settings: made.append((name, settings.pthrDelay)))
    plugin.let_nixl_rest()
    wrapped = bindings.nixlAgent
    plugin.let_nixl_rest()
    assert bindings.nixlAgent is wrapped
    bindings.nixlAgent("agent", SimpleNamespace(pthrDelay=0))
    assert made == [("agent", plugin.POLL_INTERVAL_MICROSECONDS)]


ALONE_AND_IN_A_BATCH = """
import torch
from schedloom_cpu_engine import plugin
from vllm import _custom_ops as operations

plugin.register()
torch.manual_seed(0)
weights, rows = torch.randn(512, 1536), torch.randn(64, 1536)
product = operations.create_onednn_mm(weights.t(), 32)
whole = operations.onednn_mm(product, rows, None)
assert all(torch.equal(operations.onednn_mm(product, rows[:n], None), whole[:n]) for n in range(1, 64))
"""


def test_a_row_comes_out_the_same_alone_and_in_a_batch() -> None:
    """X6: without this no preempted run could be compared with an undisturbed one, token by token."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    subprocess.run([sys.executable, "-c", ALONE_AND_IN_A_BATCH], env=environment, check=True, timeout=120)


SIZES = [3, 1]
TOKENS = [torch.arange(6.0).reshape(3, 2), torch.full((1, 2), 10.0)]
"""Uneven parts of two ranks."""

ADDENDS = [torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)]


class FakeGroup:
    """Two ranks, of which only one calls: what the other has is known."""

    def broadcast(self, part: torch.Tensor, src: int, group: object) -> None:
        part.copy_(TOKENS[src - 4])

    def all_reduce(self, total: torch.Tensor, group: object) -> None:
        total.copy_(sum(ADDENDS))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_exchange_uneven_parts(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    class Communicator(SimpleNamespace):
        pass

    monkeypatch.setattr(collectives, "distributed", FakeGroup())
    collectives.complete(Communicator)
    communicator: Any = Communicator(world_size=2, rank_in_group=rank, ranks=[4, 5], device_group=None)
    gathered, twice = communicator.all_gatherv([TOKENS[rank], TOKENS[rank]], dim=0, sizes=SIZES)
    assert gathered.tolist() == twice.tolist() == [[0, 1], [2, 3], [4, 5], [10, 10]]
    addend = ADDENDS[rank].clone()
    part = communicator.reduce_scatterv(addend, dim=0, sizes=SIZES)
    assert part.tolist() == [[[1, 2], [3, 4], [5, 6]], [[7, 8]]][rank]
    assert addend.tolist() == ADDENDS[rank].tolist()


def test_exchanges_that_a_communicator_has_stay_its_own() -> None:
    class Communicator:
        def all_gatherv(self) -> str:
            return "its own"

    collectives.complete(Communicator)
    assert Communicator().all_gatherv() == "its own"
    assert "reduce_scatterv" in vars(Communicator)


def test_a_package_that_cannot_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "INCOMPATIBLE", ("torchvision", "json"))
    with pytest.raises(check.Unusable, match="pip uninstall json"):
        check.incompatible_packages_are_absent()


def test_a_module_that_does_not_import_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(check.Unusable, match=r"^nixl\._api does not import: "):
        check.transfer_library_loads()


def test_schedloom_itself_asks_for_no_engine() -> None:
    base = [line for line in requires("schedloom") or [] if "extra ==" not in line]
    assert base and not [line for line in base if line.startswith(("torch", "vllm", "nixl", "schedloom-cpu"))]


def test_the_command_line_works_without_an_engine() -> None:
    hide = "import sys; sys.modules.update(dict.fromkeys(['torch', 'vllm', 'nixl', 'triton', 'numpy'])); "
    run = "sys.argv = ['schedloom', '--help']; from schedloom.cli import main; main()"
    subprocess.run([sys.executable, "-c", hide + run], check=True, capture_output=True)
