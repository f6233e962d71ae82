"""What vLLM loads in every process (entry-point group ``vllm.general_plugins``)."""

from __future__ import annotations


def register() -> None:
    """Bind schedloom to vLLM. May be called any number of times in one process.

    Nothing is imported before vLLM calls this: it logs and skips a plug-in whose module fails to import, and an
    engine must rather not start than run without the policies that its operator asked for.
    """
    from schedloom.adapters.engine import control, expired, heartbeats, offload, selection, signals

    control.run_folder()
    selection.install()
    offload.install()
    heartbeats.install()
    expired.install()
    signals.install()
