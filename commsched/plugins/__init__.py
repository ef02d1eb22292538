"""Plugins, one per engine. A plugin knows its engine and the core, and nothing of networks."""
