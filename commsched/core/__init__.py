"""The framework-agnostic scheduler. It uses the standard library only."""
