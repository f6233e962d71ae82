"""Contracts only: extension points, decisions, read-only views, configuration, registry and composition.

Nothing here imports an engine or a web framework, performs I/O, or has a clock of its own.
"""
