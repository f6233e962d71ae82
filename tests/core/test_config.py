"""A4, C3: what switches policies on in an engine's additional_config."""

from typing import Any

import pytest

from schedloom.core.config import read_section
from schedloom.core.errors import ConfigurationError


def choices(section: Any) -> list[str]:
    return [choice.name for choice in read_section({"scheduler_config": section}).choices]


def test_the_switch_alone_is_enough() -> None:
    assert choices({"decoder_append_prefill_enable": True}) == ["append_prefill"]


def test_the_general_form_carries_settings() -> None:
    section = {
        "policies": [{"name": "append_prefill", "max_append_tokens": 5}],
        "decoder_append_prefill_enable": True,
    }
    (choice,) = read_section({"scheduler_config": section}).choices
    assert choice.settings == {"max_append_tokens": 5}


@pytest.mark.parametrize(
    "additional",
    [
        None,
        {},
        {"scheduler_config": None},
        {"scheduler_config": {"decoder_append_prefill_enable": False}},
        {"scheduler_config": {"a_vendors_own_key": {"enabled": True}}},
        {"another_section": {"decoder_append_prefill_enable": True}},
    ],
)
def test_off_or_absent_is_off_whatever_else_stands_there(additional: Any) -> None:
    assert read_section(additional).choices == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"decoder_append_prefill_enable": True, "polices": []},
            "unknown key 'additional_config.scheduler_config.polices'; did you mean 'policies'",
        ),
        (
            {"decoder_append_prefill_enable": "perhaps"},
            "decoder_append_prefill_enable: must be a valid boolean",
        ),
        (
            {"policies": [{"max_append_tokens": 5}]},
            r"additional_config\.scheduler_config\.policies\[0\]\.name is missing",
        ),
        (
            {"decoder_append_prefil_enable": True},
            "unknown key .*; did you mean 'decoder_append_prefill_enable'",
        ),
        ({"enable_decoder_append_prefill": True}, "unknown key .*; did you mean 'decoder_append_prefill_enable'"),
        ({"policy": [{"name": "append_prefill"}]}, "unknown key .*; did you mean 'policies'"),
        ({"recompute": True}, "unknown key .*recompute"),
    ],
)
def test_a_section_that_is_on_must_fit(section: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_section({"scheduler_config": section})
