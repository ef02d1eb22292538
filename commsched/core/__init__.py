"""The framework-agnostic scheduler. Standard library only."""
