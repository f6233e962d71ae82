"""What engines say of their own work: where the tokens of their prompts came from."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

SETTLE_SECONDS = 5.0
_FAMILY = "vllm:prompt_tokens_by_source"


@dataclass(frozen=True)
class PromptTokens:
    """Prompt tokens by where their KV came from, since the engine started."""

    computed: float = 0
    from_cache: float = 0
    from_transfer: float = 0

    @property
    def total(self) -> float:
        return self.computed + self.from_cache + self.from_transfer

    def __sub__(self, earlier: PromptTokens) -> PromptTokens:
        return PromptTokens(
            self.computed - earlier.computed,
            self.from_cache - earlier.from_cache,
            self.from_transfer - earlier.from_transfer,
        )


def read(url: str) -> PromptTokens:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return parse(response.read().decode())


def parse(exposition: str) -> PromptTokens:
    sums = {"local_compute": 0.0, "local_cache_hit": 0.0, "external_kv_transfer": 0.0}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == f"{_FAMILY}_total" and sample.labels["source"] in sums:
                sums[sample.labels["source"]] += sample.value
    return PromptTokens(*sums.values())


def read_after(url: str, before: PromptTokens, tokens: int) -> PromptTokens:
    """The engine's counters once they have moved on by ``tokens``; what they are by then if they never do."""
    deadline = time.monotonic() + SETTLE_SECONDS
    now = read(url)
    while (now - before).total < tokens and time.monotonic() < deadline:
        time.sleep(0.05)
        now = read(url)
    return now
