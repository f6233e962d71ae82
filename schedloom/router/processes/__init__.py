"""Several processes that are one router: a supervisor, and children that serve."""

from schedloom.router.processes.supervisor import supervise

__all__ = ["supervise"]
