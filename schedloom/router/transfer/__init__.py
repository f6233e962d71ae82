"""How the KV of a prompt gets from a Prefiller to a Decoder: one protocol, one module for each way."""
