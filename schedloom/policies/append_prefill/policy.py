"""Admit a local attempt only where the Decoder really holds a usable prefix."""

from __future__ import annotations

from schedloom.core.decisions import Admission, Verdict
from schedloom.core.hookspecs import hookimpl
from schedloom.core.policy import Policy, Requirements
from schedloom.core.reuse import UsablePrefixRule
from schedloom.core.views import EngineView, RequestView


class AppendPrefill(Policy):
    """Reuse the resident prefix and compute the suffix here, or send the request back to its Prefiller."""

    name = "append_prefill"
    Settings = UsablePrefixRule
    requires = Requirements(decoder=True, prefix_caching=True)
    conformance_settings = UsablePrefixRule(min_reused_tokens=8, max_append_tokens=24)
    settings: UsablePrefixRule

    @hookimpl
    def admit(self, request: RequestView, view: EngineView) -> Admission | None:
        return self._judge(request, view)

    @hookimpl
    def screen(self, request: RequestView, view: EngineView) -> Admission | None:
        return self._judge(request, view)

    def _judge(self, request: RequestView, view: EngineView) -> Admission | None:
        if not request.is_local_attempt:
            return None
        reusable = view.reusable_kv(request, self.settings.enough(request.num_prompt_tokens))
        facts = {
            "prompt_tokens": request.num_prompt_tokens,
            "resident_tokens": reusable.resident,
            "restorable_tokens": reusable.restorable or 0,
        }
        if self.settings.is_hopeless(request.num_prompt_tokens, reusable):
            return Admission(Verdict.REJECT, "no_usable_prefix", facts)
        return Admission(Verdict.ADMIT, "usable_prefix", facts)
