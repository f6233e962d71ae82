"""What the suite costs: measured against the scheduler's own time within the same steps."""

import time
from typing import Any

from schedloom.conformance.bench import Bench
from schedloom.conformance.cells import Cell
from schedloom.conformance.laboratory import Laboratory
from schedloom.conformance.script import Arrive, Drain, Step

REQUESTS = 32
MOST_TIMES_STOCK = 2.5


def test_a_step_costs_little_more_than_the_scheduler_itself(laboratory: Laboratory) -> None:
    cell = Cell(roomy=True, max_num_seqs=REQUESTS, max_model_len=512, token_budget=512, block_size=16)
    bench = Bench(laboratory, cell, None)
    stock = _timed(bench.engine)
    for number in range(REQUESTS):
        bench.do(Arrive(number, fresh=60, max_tokens=300))
    began = time.process_time()
    bench.do(Step(250))
    spent = time.process_time() - began
    bench.do(Drain())
    assert spent < MOST_TIMES_STOCK * stock[0], f"{spent / stock[0]:.2f} times, {250 / spent:.0f} steps a second"


def _timed(engine: Any) -> list[float]:
    total = [0.0]

    def timed(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments)
            finally:
                total[0] += time.process_time() - began

        return call

    scheduler = engine.scheduler
    scheduler.schedule = timed(scheduler.schedule)
    scheduler.update_from_output = timed(scheduler.update_from_output)
    return total
