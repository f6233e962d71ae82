"""The binding to vLLM's scheduler that both model runners share."""
