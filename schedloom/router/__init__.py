"""The prefill/decode router: an ASGI application in front of Prefillers and Decoders."""
