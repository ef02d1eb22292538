"""Averaging of contributions in memory, for a parameter server's shard and for a host's leader."""
