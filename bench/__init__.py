"""Benchmarks of commsched: ``python -m bench COMMAND`` in a checkout.

A wheel holds this package as ``commsched.bench``, since ``bench`` may be anybody's, and ``commsched bench COMMAND`` runs it. So
modules here import each other by relative names, and name each other by ``__package__``.
"""

INSTALLED = __name__ != "bench"
#: The command by which a user runs this package.
PROGRAM = "commsched bench" if INSTALLED else "python -m bench"
