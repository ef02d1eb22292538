"""One rank of a job that :mod:`bench.job` started: ``python -m bench.rank MODULE OUTPUT ARGUMENTS``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

import commsched
from commsched.core.errors import CommschedError


def main() -> int:
    """0, and what the rank returned is in OUTPUT; or 1, and why is on stderr."""
    module, output, arguments = sys.argv[1:]
    try:
        with commsched.init() as session:
            returned = import_module(module).rank_main(session, json.loads(arguments))
        Path(output).write_text(json.dumps(returned))
    except CommschedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed or written. What engines do at the interpreter's end is not waited for: gloo's now and then hangs.
    os._exit(code)
