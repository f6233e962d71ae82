"""Waiting queues that vLLM's scheduler works on instead of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.request_queue import RequestQueue

from schedloom.core.decisions import Lane

NO_LANE = Lane("")


class HeldQueue:
    """Another queue that says it is empty, so that vLLM admits nobody else from it in this step."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.queue)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)


class LanedQueue(RequestQueue):
    """A queue of lanes, each first come first served; who comes next of several lanes is for their delays to say.

    A prepended request goes back to the head of its lane; one that was preempted goes before all lanes, as vLLM's own
    queue has it. A lane that is closed shows none of its requests until ``reopen``.
    """

    def __init__(self, lane_of: Callable[[Any], Lane], clock: Callable[[], float]) -> None:
        self._lane_of = lane_of
        self._clock = clock
        self._arrived: deque[tuple[Any, float]] = deque()
        self._preempted: deque[Any] = deque()
        self._lanes: dict[Lane, deque[Any]] = {}
        self._closed: set[Lane] = set()
        self._places: WeakKeyDictionary[Any, tuple[Lane, float]] = WeakKeyDictionary()
        self._head: deque[Any] | None = None

    def add_request(self, request: Any) -> None:
        if request.num_preemptions:
            self._preempted.append(request)
        else:
            self._arrived.append((request, self._clock()))
        self._head = None

    def peek_request(self) -> Any:
        self._head = self._first()
        if self._head is None:
            raise IndexError("peek from an empty queue")
        return self._head[0]

    def pop_request(self) -> Any:
        """The request that ``peek_request`` has shown, even if its lane was closed since."""
        head = self._first() if self._head is None else self._head
        self._head = None
        if head is None:
            raise IndexError("pop from an empty queue")
        return head.popleft()

    def prepend_request(self, request: Any) -> None:
        self._home_of(request).appendleft(request)
        self._head = None

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests)
        self._arrived = deque(entry for entry in self._arrived if entry[0] not in gone)
        for home in (self._preempted, *self._lanes.values()):
            if not gone.isdisjoint(home):
                kept = [request for request in home if request not in gone]
                home.clear()
                home.extend(kept)
        self._head = None

    def close_lane(self, request: Any) -> None:
        """Show nobody of this request's lane, itself included, until ``reopen``."""
        self._closed.add(self._places[request][0])

    def reopen(self) -> None:
        self._closed.clear()

    def level(self) -> None:
        """One lane for all who wait, in the order in which they came."""
        if not any(waiting for lane, waiting in self._lanes.items() if lane != NO_LANE):
            return
        waiting = sorted(chain.from_iterable(self._lanes.values()), key=lambda request: self._places[request][1])
        self._places.update({request: (NO_LANE, self._places[request][1]) for request in waiting})
        self._lanes = {NO_LANE: deque(waiting)}
        self._head = None

    def __bool__(self) -> bool:
        return self._first() is not None

    def __len__(self) -> int:
        return len(self._arrived) + len(self._preempted) + sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Any]:
        self._place_arrived()
        ordered = sorted(chain.from_iterable(self._lanes.values()), key=self._turn)
        return chain(tuple(self._preempted), ordered)

    def _first(self) -> deque[Any] | None:
        """Where the next request stands."""
        self._place_arrived()
        if self._preempted:
            return self._preempted
        heads = [lane for key, lane in self._lanes.items() if lane and key not in self._closed]
        if len(heads) > 1:
            return min(heads, key=lambda lane: self._turn(lane[0]))
        return heads[0] if heads else None

    def _place_arrived(self) -> None:
        """Ask for lanes as late as possible: not before the engine has told its connectors of the request."""
        while self._arrived:
            request, arrived = self._arrived.popleft()
            self._places[request] = self._lane_of(request), arrived
            self._home_of(request).append(request)

    def _home_of(self, request: Any) -> deque[Any]:
        if request.num_preemptions:
            return self._preempted
        lane = self._places.setdefault(request, (NO_LANE, self._clock()))[0]
        return self._lanes.setdefault(lane, deque())

    def _turn(self, request: Any) -> float:
        lane, arrived = self._places[request]
        return arrived + lane.delay
