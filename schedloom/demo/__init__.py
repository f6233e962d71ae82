"""The demo: real engines on the CPUs of one machine, and a model small enough to start them in seconds."""
