"""A tox plugin, which tox loads by itself: lets pyenv's interpreters be found.

pyenv puts shims for all its versions on the PATH, but only those of the active version work.
So the folders behind the shims are added at the end of the PATH. Without pyenv nothing changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tox.plugin import impl

if TYPE_CHECKING:
    from tox.config.cli.parser import ToxParser


def pyenv_folders() -> list[str]:
    """Return the folder of each CPython that pyenv has installed, the newest first."""
    root = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"))
    versions = [v for v in root.glob("versions/3.*") if (v / "bin" / "python").exists()]
    versions.sort(key=lambda v: [int(n) for n in v.name.split(".") if n.isdigit()], reverse=True)
    return [str(v / "bin") for v in versions]


@impl
def tox_add_option(parser: ToxParser) -> None:
    """Extend the PATH. It adds no option: of tox's hooks this is the first to be called."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *pyenv_folders()])
