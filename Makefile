# Everything runs in .venv, which `scripts/setup.py` makes and keeps up to date.
PYTHON ?= python3
RUNNER ?= v1
JSON   ?=
BIN    := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test engines lint conformance bench-scheduler bench-router bench-stickiness load setup clean

help:  ## Print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup  ## Run the demo on real engines; RUNNER=v1|v2 picks the model runner, JSON=PATH keeps the numbers
	@$(BIN)/schedloom demo --runner $(RUNNER) $(if $(JSON),--json $(JSON))

test: lint  ## Lint and test, on real engines too
	@$(BIN)/pytest --numprocesses 2 -p no:benchmark -m "not engines and not deep"
	@$(BIN)/pytest -m "engines and not deep"

engines: setup  ## Every test on real engines, the long ones included
	@$(BIN)/pytest -m engines

lint: setup  ## Check style, types and the borders between the rooms
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

conformance: setup  ## The core profile of the conformance suite, real engines included (some twenty minutes on two cores); JSON=PATH keeps the figures
	@$(BIN)/schedloom conformance run --profile core --workers 2 --report conformance-report.yaml $(if $(JSON),--json $(JSON))

bench-scheduler: setup  ## What composed schedulers cost, as ratios to vLLM's own; JSON=PATH keeps the figures
	@$(BIN)/pytest benchmarks --benchmark-columns=median,iqr,rounds $(if $(JSON),--figures $(JSON))

bench-router: setup  ## What the router costs and bears, as ratios to vllm-router; needs gcc; JSON=PATH keeps the figures
	@$(BIN)/python -m benchmarks.router $(if $(JSON),--json $(JSON))

load: setup  ## The load tool aiperf, run against the router with real engines behind it; JSON=PATH keeps the figures
	@$(BIN)/python -m benchmarks.aiperf --engines real $(if $(JSON),--json $(JSON))

bench-stickiness: setup  ## What it gains to keep sessions on their Decoders, on a simulated fleet
	@$(BIN)/python -m benchmarks.stickiness

setup:  ## Make or update .venv (done by the other targets too)
	@$(PYTHON) scripts/setup.py

clean:  ## Remove .venv and everything that is generated
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
