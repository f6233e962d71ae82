"""What a vLLM built for CPUs needs to run Model Runner V2 and NIXL; see docs/cpu-engines.md."""
