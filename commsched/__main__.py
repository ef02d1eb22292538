"""The entry point of ``python -m commsched`` and of the ``commsched`` command."""

import sys


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        from .cli.main import main as run  # slow: the user may press Ctrl-C meanwhile
    except KeyboardInterrupt:
        sys.stderr.write("commsched: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
