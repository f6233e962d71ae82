from hypothesis import HealthCheck, settings

# The same examples everywhere, however slow the machine: what is green is green again.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
