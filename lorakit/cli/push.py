"""push: a patch into a repository of the hub."""

import argparse

from lorakit.cli.arguments import AddCommand, print_line


def add_push_command(add_command: AddCommand) -> None:
    """Add `push`."""
    push = add_command("push", _push, "push a patch to the hub, without the paths of this machine")
    push.add_argument("patch", metavar="PATCH", help="patch folder")
    push.add_argument("repository", metavar="ORGANISATION/NAME", help="repository; it is made if there is none")
    push.add_argument("--base", metavar="NAME", help="name of the base in the pushed patch (default: as in the patch)")
    push.add_argument("--private", action="store_true", help="make the repository private; refuse one that is public")
    push.add_argument("--message", help="message of the commit")


def _push(options: argparse.Namespace) -> int:
    from lorakit.export.hub import push_patch

    address = push_patch(
        options.patch, options.repository, base=options.base, private=options.private, message=options.message
    )
    print_line(f"pushed: {address}")
    print_line(f"use it     --adapter NAME={options.repository} in place of a folder")
    return 0
