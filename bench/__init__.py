"""Benchmarks of commsched: ``python -m bench COMMAND``."""
