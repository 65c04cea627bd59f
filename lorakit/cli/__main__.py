"""``python -m lorakit.cli``: run the lorakit command."""

from lorakit.cli.main import main

raise SystemExit(main())
