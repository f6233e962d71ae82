"""Usage: python -m schedloom.adapters.engine.reality MODEL CASE, a JSON object. Prints what was seen as another one.

The model runner, and what else a vLLM on a CPU is told, come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pkgutil import resolve_name
from typing import Any

from schedloom.adapters.engine.reality.engines import keep_asynchronous_scheduling
from schedloom.core.errors import ConfigurationError


def main() -> None:
    model, case = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"found": _found(model, case)}), flush=True)
    # Engines that share a process cannot be shut down one by one: the end of the process ends them.
    os._exit(0)


def _found(model: str, case: dict[str, Any]) -> dict[str, Any]:
    from schedloom.adapters.engine.reality.play import Play

    keep_asynchronous_scheduling()
    if case["fault"]:
        resolve_name(case["fault"])()
    try:
        play = Play(case, model)
    except ConfigurationError as error:
        return {"refused": str(error)}
    return play.run()


if __name__ == "__main__":
    main()
