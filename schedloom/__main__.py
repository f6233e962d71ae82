"""The command ``schedloom``, and ``python -m schedloom``."""

from __future__ import annotations

import sys

from schedloom.router.hangup import hangups


def main() -> None:
    """A router heeds hangups before all that a command needs is loaded, which takes a second."""
    if sys.argv[1:2] == ["route"]:
        hangups.heed()
    from schedloom.cli import main as run

    run()


if __name__ == "__main__":
    main()
