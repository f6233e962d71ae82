"""Turn away the local attempts that are not in the drawn share."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

from pydantic import Field

from schedloom import Policy, PolicySettings, hookimpl
from schedloom.core.decisions import Admission, Verdict
from schedloom.core.views import RequestView


class GradualRolloutSettings(PolicySettings):
    """How many, and which."""

    percent: Annotated[float, Field(ge=0, le=100)] = 10.0
    """Share of local attempts that may stay on the Decoder."""

    salt: str = ""
    """Change it to draw other requests."""


class GradualRollout(Policy):
    """Let a share of local attempts stay on the Decoder, drawn by their ids."""

    name = "gradual_rollout"
    Settings = GradualRolloutSettings
    conformance_settings = GradualRolloutSettings(percent=50)
    settings: GradualRolloutSettings

    @hookimpl
    def admit(self, request: RequestView) -> Admission | None:
        return self._draw(request)

    @hookimpl
    def screen(self, request: RequestView) -> Admission | None:
        return self._draw(request)

    def _draw(self, request: RequestView) -> Admission | None:
        if not request.is_local_attempt:
            return None
        # Python's own hash differs from process to process, and a checksum spreads ids that look alike unevenly.
        digest = blake2b(f"{self.settings.salt}{request.request_id}".encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "big") / 2**64 * 100
        facts = {"position": position, "percent": self.settings.percent}
        if position < self.settings.percent:
            return Admission(Verdict.ADMIT, "in_rollout", facts)
        return Admission(Verdict.REJECT, "outside_rollout", facts)
