"""Shared parts of the benchmark commands: shaped links, ranks, one measured run of a system, and tables."""
