"""The fixtures are in the modules named `fix_…`: one plugin for each concern."""

from __future__ import annotations

pytest_plugins = ["fix_postgres", "fix_proxy", "fix_worker", "fix_cluster", "fix_loops"]
