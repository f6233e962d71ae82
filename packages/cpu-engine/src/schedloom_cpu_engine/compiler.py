"""The compiler half of the `cpu` Triton backend: nothing is compiled, the interpreter runs the kernels."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpretedBackend(BaseBackend):
    """Accepts the `cpu` target and refuses to compile for it."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Whether `target` names this backend."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """A constant: nothing is ever cached for this backend."""
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options unchanged: no compiler reads them."""
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: object) -> None:
        """Raises RuntimeError: kernels are interpreted, so a request to compile one is a set-up error."""
        raise RuntimeError("Triton compiles no kernels for a CPU: set TRITON_INTERPRET=1 before it is imported.")

    def load_dialects(self, context: object) -> None:
        """Nothing to load."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device-specific modules."""
        return {}
