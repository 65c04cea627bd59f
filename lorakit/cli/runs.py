"""compare, report: runs side by side, and one run as a page."""

import argparse

from lorakit.cli.arguments import AddCommand, print_line


def add_run_commands(add_command: AddCommand) -> None:
    """Add `compare` and `report`."""
    compare = add_command("compare", _compare, "show how runs differ: their figures, recipes, data and bases")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, also of one under way")
    compare.add_argument("--out", metavar="FILE", help="draw the losses in this .png")
    compare.add_argument("--json", metavar="FILE", help="write every figure")
    report = add_command("report", _report, "write one HTML page about a run: curves, settings, memory, facts")
    report.add_argument("run_folder", metavar="RUN", help="output folder of a run, also of one under way")
    report.add_argument("--out", metavar="FILE", help="file to write (default: report.html in the folder)")


def _compare(options: argparse.Namespace) -> int:
    from lorakit.inspection.compare import compare_runs, write_comparison

    figures = compare_runs(options.runs, print_line, picture=options.out)
    if options.json is not None:
        write_comparison(figures, options.json)
    return 0


def _report(options: argparse.Namespace) -> int:
    from lorakit.inspection.html_report import write_report

    print_line(f"written to {write_report(options.run_folder, options.out)}")
    return 0
