"""``python -m schedloom``."""

from schedloom.cli import main

main()
