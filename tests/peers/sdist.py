"""Fetch the tests that only a package's sdist holds: ``python sdist.py PACKAGE FOLDER``.

They are those of the version that is installed, and are fetched once. Nothing else is unpacked:
a copy of the package beside its tests could be imported instead of the installed one.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path


def fetch(package: str, folder: Path) -> Path:
    """Return the folder of the package's tests, after a download if it is not there yet."""
    release = f"{package}-{metadata.version(package)}"
    target = folder / release
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _unpack_tests(_download(package, Path(work)), release, Path(work))
            # A run that is stopped leaves nothing that looks complete.
            (Path(work) / release).rename(target)
    return target


def _download(package: str, folder: Path) -> Path:
    requirement = f"{package}=={metadata.version(package)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", package, "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def _unpack_tests(archive: Path, release: str, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        wanted = (f"{release}/t/", f"{release}/pyproject.toml")
        members = [member for member in tar if member.name.startswith(wanted)]
        tar.extractall(folder, members, filter="data")


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
