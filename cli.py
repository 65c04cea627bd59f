"""Run lorakit from a checkout: python cli.py train recipes/quickstart.yaml. The installed command is `lorakit`."""

import os
from pathlib import Path

from lorakit.cli import main

if __name__ == "__main__":
    # the processes of a distributed run import lorakit too, and do not search the current folder
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent.absolute()), os.environ.get("PYTHONPATH")])
    )
    raise SystemExit(main())
