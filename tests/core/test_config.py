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
            "decoder_append_prefill_enable: must be true or false",
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
        ({"append-prefill": True}, "unknown key .*; did you mean 'decoder_append_prefill_enable'"),
        ({"POLICIES": [{"name": "append_prefill"}]}, "unknown key .*; did you mean 'policies'"),
        ({"policies": [{"nam": "append_prefill"}]}, r"policies\[0\]\.name is missing; it has a key 'nam'"),
        (
            {"decoder_append_prefill_enable": False, "policies": [{"name": "append_prefill"}]},
            r"additional_config\.scheduler_config: decoder_append_prefill_enable is false, but .*'append_prefill'",
        ),
        (
            {"recompute_scheduler_enable": False, "policies": [{"name": "recompute"}]},
            "recompute_scheduler_enable is false, but policies name 'recompute'",
        ),
        ("decoder_append_prefill_enable", r"additional_config\.scheduler_config: must be a mapping"),
        ('{"decoder_append_prefill_enable": true}', r"additional_config\.scheduler_config: must be a mapping"),
        ([{"name": "tpot_guard"}], r"additional_config\.scheduler_config: must be a mapping"),
    ],
)
def test_a_section_that_is_on_must_fit(section: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_section({"scheduler_config": section})


@pytest.mark.parametrize(
    ("additional", "sentence"),
    [
        (
            {"scheduler_confg": {"decoder_append_prefill_enable": True}},
            "unknown key 'additional_config.scheduler_confg'; did you mean 'scheduler_config'?",
        ),
        (
            {"scheduler-config": {"policies": [{"name": "tpot_guard"}]}},
            "unknown key 'additional_config.scheduler-config'; did you mean 'scheduler_config'?",
        ),
        (
            {"scheduler_config": {"policies": []}, "decoder_append_prefill_enable": True},
            "unknown key 'additional_config.decoder_append_prefill_enable'; write it inside scheduler_config",
        ),
    ],
)
def test_what_was_meant_to_be_our_section_is_not_passed_over(additional: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_section(additional)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "additional",
    [
        {"ascend_scheduler_config": {"enabled": True, "enable_chunked_prefill": True}},
        {"recompute_scheduler_enable": True},
        {"scheduler_config": "a_vendors_own"},
        {"scheduler_config": ["a_vendors_own"]},
        {1: 2},
    ],
)
def test_what_is_a_vendors_own_is_passed_over(additional: Any) -> None:
    assert not read_section(additional).is_on
