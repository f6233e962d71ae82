"""Batch jobs behind interactive requests."""

from schedloom.policies.batch_job_aware.policy import BatchJobAware

__all__ = ["BatchJobAware"]
