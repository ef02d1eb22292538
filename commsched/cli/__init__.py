"""The command line: ``commsched run``, ``server`` and ``tune``."""
