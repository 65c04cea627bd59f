"""``python -m lorakit.cli``: the lorakit command."""

from lorakit.cli.main import main

raise SystemExit(main())
