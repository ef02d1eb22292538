from hypothesis import HealthCheck, settings

# The same examples every time, and no verdict that depends on how busy the machine is.
settings.register_profile("simulator", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("simulator")
