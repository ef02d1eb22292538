"""The command line with a launcher that leaves the other processes a minute to end by themselves, and to name the cause: five
seconds may not be enough for that on a busy machine."""

import sys

from commsched.__main__ import main
from commsched.core import timeouts

if __name__ == "__main__":
    timeouts.LAUNCHER_SECONDS = 60.0
    sys.exit(main())
