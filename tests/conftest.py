"""What every test shares."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests on real engines on one worker: a few engines at a time fill a small machine."""
    for item in items:
        if item.get_closest_marker("engines"):
            item.add_marker(pytest.mark.xdist_group("engines"))
