"""What holds under every fault: the complaints of clients, of engines and of operators, each with what it breaks."""

from __future__ import annotations

import json

from schedloom.router.laboratory.engines import WORDS
from schedloom.router.laboratory.town import CONTINUATIONS, Town, Turn

Wrong = tuple[str, str]
"""The id of an invariant, and a sentence."""

CONTINUED = ("continued", "failed")
RESULTS = ("hit", "rejected", "error")


def wrongs_of_town(town: Town) -> list[Wrong]:
    wrongs = [(_broken_by(wrong), wrong) for wrong in town.ledger.wrongs]
    wrongs += [(invariant, f"{turn.label}: {wrong}") for turn in town.turns for invariant, wrong in wrongs_of(turn)]
    wrongs += [("KV-2", f"{engine.origin} was left with KV") for engine in town.engines if engine.leases]
    wrongs += [("LIVE-1", f"{worker.name} is still busy") for worker in town.app.fleet.workers if worker.in_flight]
    wrongs += [("LIVE-1", "the gate still counts somebody")] if town.app.door.gate.inside else []
    return [*wrongs, *_unbounded(town), *_miscounted(town)]


def _broken_by(wrong: str) -> str:
    """Engines complain of tickets and marks, of a local attempt that is none, or of KV that was pulled wrongly; some of
    what they get should have gone elsewhere."""
    if "owner" in wrong:
        return "OWN-1"
    if "ticket" in wrong or "marks" in wrong:
        return "RET-2"
    return "REJ-1" if "local attempt" in wrong else "KV-4"


def _unbounded(town: Town) -> list[Wrong]:
    back = town.ledger.handed_back
    # A local attempt that is handed back without output may look as if it was turned away.
    wrongs = [("FB-1", f"{label}: handed back {n} times") for label, n in back.items() if n > CONTINUATIONS + 1]
    most = {label: town.most_dispatches + 2 * back.get(label, 0) for label in town.ledger.dispatches}
    sent = town.ledger.dispatches.items()
    return wrongs + [("FB-1", f"{label}: {n} dispatches") for label, n in sent if n > most[label]]


def _miscounted(town: Town) -> list[Wrong]:
    value = town.app.metrics.registry.get_sample_value
    wrongs: list[Wrong] = []
    attempts = value("schedloom_router_local_attempts_total") or 0
    results = [value("schedloom_router_local_attempt_results_total", {"result": result}) or 0 for result in RESULTS]
    if attempts != sum(results):
        wrongs.append(("OBS-1", f"{attempts} attempts, but results {results}"))
    ends = [value("schedloom_router_continuations_total", {"result": result}) or 0 for result in CONTINUED]
    handed_back = value("schedloom_router_handed_back_total") or 0
    if handed_back != sum(ends):
        wrongs.append(("OBS-1", f"{handed_back} handed back, but {ends}"))
    return wrongs


def wrongs_of(turn: Turn) -> list[Wrong]:
    """What the client of one turn would complain about."""
    received = turn.received
    if turn.left and not received.ended:
        return []
    if not received.ended:
        return [("OUT-1", "the answer has no end")]
    if b"schedloom" in received.body:
        return [("REJ-1", "a rejection reached the client")]
    if b'"internal_error"' in received.body:
        return [("OUT-1", "the router failed")]
    if received.status != 200:
        return [] if "error" in json.loads(received.body) else [("OUT-1", "an error without a message")]
    return _wrong_words(turn)


def _wrong_words(turn: Turn) -> list[Wrong]:
    words, failed = _words(turn)
    answers = {word.split(".")[0] for word in words}
    if len(answers) > 1 or [word.split(".")[1] for word in words] != [str(n) for n in range(len(words))]:
        return [("OUT-3", f"output was mixed or replayed: {words}")]
    if turn.stream and len({part["id"] for part in turn.received.objects if "id" in part}) > 1:
        return [("OUT-2", "one stream under several ids")]
    return [] if failed or len(words) == WORDS else [("OUT-2", f"a short answer looks complete: {words}")]


def _words(turn: Turn) -> tuple[list[str], bool]:
    if not turn.stream:
        return turn.received.text.split(), False
    events = turn.received.events
    failed = any("error" in json.loads(event) for event in events if event != "[DONE]")
    assert failed != (events[-1] == "[DONE]"), events
    text = "".join(
        choice["text"] for event in events if event != "[DONE]" for choice in json.loads(event).get("choices", [])
    )
    return text.split(), failed
