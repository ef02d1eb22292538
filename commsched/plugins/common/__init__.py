"""Helpers that the plugins of several engines share."""
