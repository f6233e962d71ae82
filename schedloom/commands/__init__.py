"""The commands that inspect policies, configurations and environments, and start a new policy.

They import core only; what other rooms know reaches them through entry points.
"""
