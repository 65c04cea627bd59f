"""Run lorakit from a checkout: python cli.py train recipes/quickstart.yaml. Installed, it is the command `lorakit`."""

from lorakit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
