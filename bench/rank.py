"""One rank of a job that :mod:`bench.job` started: ``python -m bench.rank MODULE OUTPUT ARGUMENTS``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import commsched
from commsched.core.errors import CommschedError


def main() -> None:
    module, output, arguments = sys.argv[1:]
    try:
        with commsched.init() as session:
            returned = import_module(module).rank_main(session, json.loads(arguments))
    except CommschedError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    Path(output).write_text(json.dumps(returned))


if __name__ == "__main__":
    main()
