"""Errors that say what to change."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A configuration that cannot be used as it stands. The message is one sentence and says what to change."""
