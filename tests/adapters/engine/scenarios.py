"""What must hold of any admission policy on a real scheduler. Each scenario returns what it found to be wrong."""

from __future__ import annotations

from schedloom.core.wire import REJECTION_PREFIX
from tests.adapters.engine.harness import TOKEN, FakeRunner, bookkeeping, make_request, tokens

REJECTED = ("stop", REJECTION_PREFIX + "no_usable_prefix")
HISTORY = tokens(1, 400)


def warm_up(runner: FakeRunner) -> list[int]:
    """Serve a first turn, and return the history whose KV is now resident."""
    runner.scheduler.add_request(make_request("first turn", HISTORY, max_tokens=20))
    runner.drain()
    return HISTORY + runner.produced["first turn"]


def cold_attempt(runner: FakeRunner) -> list[str]:
    """A marked request without KV is turned away at once, as if it had never come (A3)."""
    warm_up(runner)
    before = bookkeeping(runner.scheduler)
    runner.scheduler.add_request(make_request("cold", tokens(2, 300), marked=True))
    runner.steps(runner.depth)
    wrong = []
    if runner.ended.get("cold") != REJECTED:
        wrong.append(f"not turned away within a step: {runner.ended.get('cold')}")
    runner.drain()
    if runner.produced.get("cold"):
        wrong.append("it has output")
    if bookkeeping(runner.scheduler) != before:
        wrong.append("it left something behind")
    return wrong


def warm_attempt(runner: FakeRunner) -> list[str]:
    """A marked request with a resident prefix is admitted and computes only its suffix (A3)."""
    prompt = warm_up(runner) + tokens(3, 50)
    runner.scheduler.add_request(make_request("warm", prompt, marked=True))
    scheduled = runner.step()
    runner.drain()
    resident = (len(HISTORY) + 19) // 16 * 16
    wrong = []
    if scheduled.num_scheduled_tokens.get("warm") != len(prompt) - resident:
        wrong.append(f"scheduled {scheduled.num_scheduled_tokens}, not its suffix of {len(prompt) - resident}")
    if runner.ended.get("warm") != ("length", None) or runner.produced["warm"] != [TOKEN] * 4:
        wrong.append(f"not answered: {runner.ended.get('warm')}")
    return wrong


def preempted_attempt(runner: FakeRunner) -> list[str]:
    """A local attempt that was admitted, produced output, was preempted and lost its prefix is finished (A5).

    Needs a pool of 50 blocks.
    """
    prompt = warm_up(runner) + tokens(3, 20)
    runner.scheduler.add_request(make_request("other", tokens(4, 200), max_tokens=500))
    runner.steps(3)
    runner.scheduler.add_request(make_request("attempt", prompt, max_tokens=300, marked=True))
    preempted = False
    for _ in range(1500):
        if not runner.scheduler.has_requests():
            break
        runner.step()
        attempt = runner.scheduler.requests.get("attempt")
        preempted |= bool(attempt is not None and attempt.num_preemptions and attempt.num_output_tokens)
    runner.drain()
    if not preempted:
        return ["inconclusive: nothing was preempted after output"]
    if runner.ended.get("attempt") != ("length", None) or len(runner.produced["attempt"]) != 300:
        return [f"ended with {runner.ended.get('attempt')} after {len(runner.produced['attempt'])} tokens"]
    return []
