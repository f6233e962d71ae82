"""The driver half of the `cpu` Triton backend: one device, one stream, host memory."""

import os
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Stands in for an accelerator while Triton's interpreter executes kernels on the host."""

    @classmethod
    def is_active(cls) -> bool:
        """Whether Triton's interpreter is switched on for this process."""
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty: str) -> str:
        """The type's own name: no C++ launcher is generated."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The one target there is; a warp is one thread wide."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Raises RuntimeError: timing interpreted kernels tells nothing."""
        raise RuntimeError("Interpreted Triton kernels are not benchmarked.")

    def get_current_device(self) -> int:
        """The index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only stream of the only device."""
        return 0

    def get_device_interface(self) -> Any:
        """torch's own view of the host as a device."""
        return torch.cpu
