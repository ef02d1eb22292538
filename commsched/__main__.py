"""``python -m commsched``: the same as the ``commsched`` command."""

import sys

from .cli import main

sys.exit(main())
