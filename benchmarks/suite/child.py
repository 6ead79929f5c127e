"""Runs one measure in a process of its own and prints what it found as JSON."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: Seconds after which a measure is given up.
PATIENCE = 900.0

#: Characters of its last words that are kept of a measure that failed.
LAST_WORDS = 600


def measure(
    function: str, arguments: dict[str, Any], url: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Run a measure in a new process; return its figures, or an ``error``.

    Arguments:
        function: ``module.function`` of this package.
        arguments: keywords for it.
        url, options: the broker and its ``transport_options``.
    """
    # Nothing of an interpreter's or a client's settings may make one broker another.
    env = {name: value for name, value in os.environ.items() if name[:2] != "PG"}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        env |= {"BENCH_URL": url, "BENCH_OPTIONS": json.dumps(options), "BENCH_FOLDER": folder}
        command = [sys.executable, "-m", f"{__package__}.child", function, json.dumps(arguments)]
        return _run(command, env)


def _run(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run it to its end, with all that it starts; return what it prints, or an ``error``."""
    process = subprocess.Popen(
        command,
        cwd=HERE.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaints = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {PATIENCE:g} s"}
    finally:
        # Also what it has left behind: a worker would take the next one's tasks.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        return {"error": complaints.strip()[-LAST_WORDS:] or f"exit code {process.returncode}"}
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def main() -> None:
    """Run the measure that the command line names."""
    function, arguments = sys.argv[1:]
    module, _, name = function.partition(".")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    print(json.dumps(found(**json.loads(arguments))))


if __name__ == "__main__":
    main()
