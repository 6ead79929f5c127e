"""See that the broker loses nothing: `python tests/faults/chaos.py --minutes 2`.

Starts a PostgreSQL, workers of several pools and producers; kills, stops and cuts off what a
seeded generator chooses; then checks that every accepted task ran, and that none ran twice
without a cause. Ends with 1 if an invariant is broken, with 3 if it could not come to an end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="See that the broker loses nothing.")
    parser.add_argument("--minutes", type=float, default=2, help="how long faults strike")
    parser.add_argument("--seed", type=int, help="of the faults and tasks; random by default")
    parser.add_argument("--lease", type=float, default=4, help="visibility_timeout, in seconds")
    parser.add_argument("--rate", type=float, default=15, help="tasks a second")
    parser.add_argument("--pause", type=float, default=3.5, help="seconds between two faults")
    parser.add_argument("--json", type=Path, help="write the result to this file too")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    args = parser.parse_args(arguments)
    # The fixtures of the tests, where this is run as a program.
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from chaos_run import Run

    # As on Ctrl-C: nothing that was started may stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    say(f"chaos: seed {seed}")
    report = Run(args, seed, say).run()
    say("\n".join(report.lines()))
    if args.json:
        args.json.write_text(report.to_json(), "utf-8")
    if not report.broken and not args.keep:
        shutil.rmtree(report.folder, ignore_errors=True)
    return int(report.broken)


def say(line: str) -> None:
    """Print a line at once, for whoever follows the run."""
    sys.stdout.write(f"{line}\n" if line.startswith("\n") else f"{time.strftime('%X')} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
