"""Plugins, one per engine (training framework). A plugin depends on its engine and the core, and on no network code."""
