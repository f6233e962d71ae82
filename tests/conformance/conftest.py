import pytest

from schedloom.conformance.laboratory import Laboratory, load_laboratory


@pytest.fixture(scope="session")
def laboratory() -> Laboratory:
    pytest.importorskip("vllm", reason="needs an engine: install schedloom[cpu]")
    return load_laboratory()
