"""What every test shares."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Puts tests on real engines on one worker: a few engines at a time fill a small machine."""
    if item.get_closest_marker("engines"):
        item.add_marker(pytest.mark.xdist_group("engines"))
