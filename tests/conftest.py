import os

from hypothesis import HealthCheck, settings

# Whatever the tests and the processes that they start ask for is on this machine: no proxy has it.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"

# The same examples in every run, and no example fails for the time that it takes: how fast the machine is, and what
# else runs on it, says nothing about what is tested.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
