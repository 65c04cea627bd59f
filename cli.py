"""Run lorakit from a checkout: python cli.py train recipes/quickstart.yaml. The installed command is `lorakit`."""

from lorakit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
