"""What the figures were measured with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

#: Packages whose versions matter.
PACKAGES = ("kombu-pgnotify", "kombu", "celery", "psycopg", "SQLAlchemy", "amqp", "redis")


def describe() -> dict[str, str]:
    """Return the machine's and the packages' names and versions."""
    found = {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    """Return the processor's model, or at least its kind."""
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()
