"""Requests that an engine hands back, and that go on at another."""
