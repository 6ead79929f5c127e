"""Measures kombu_pgnotify: beside Redis and RabbitMQ, and beside bare PostgreSQL.

    tox -e bench                                  # everything: about two hours
    tox -e bench -- --quick                       # does it work? about ten minutes
    tox -e bench -- --only publish,e2e_prefork2   # see --list

PostgreSQL and Redis (if there is a `redis-server`) are started here; a RabbitMQ is used if one
answers. The results go to build/bench/results.json, .md and .png. Each figure comes from a
process of its own, and all sides take turns: believe the ratios, the machine's speed is its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from suite import chart, child, machine, plan, report, servers
from suite.targets import Results

#: Where the results go: git ignores it.
RESULTS = Path(__file__).resolve().parent.parent / "build" / "bench"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pg-url", help="a running PostgreSQL, where databases may be created")
    parser.add_argument("--redis", help="URL of a running Redis, or none")
    parser.add_argument(
        "--rabbitmq", default=servers.RABBITMQ, help="URL of a running RabbitMQ, or none"
    )
    parser.add_argument("--repeats", type=int, help="5 unless given, 1 with --quick")
    parser.add_argument("--only", default="", help="measures, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small and once: to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--list", action="store_true", help="say what measures there are")
    given = parser.parse_args()
    given.repeats = given.repeats or (1 if given.quick else 5)
    try:
        names = [name for name in given.only.split(",") if name]
        given.measures = plan.chosen(given.quick, names)
    except ValueError as exc:
        parser.error(str(exc))
    return given


def main() -> None:
    """Measure, and write down what was found."""
    given = arguments()
    if given.list:
        for each in given.measures:
            print(f"{each.name:18}{each.title}")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    with servers.all_brokers(given.pg_url, given.redis, given.rabbitmq) as brokers:
        for reason in brokers.missing.values():
            print(f"left out: {reason}", flush=True)
        try:
            for key, run in turns(given, brokers):
                results[key] = measure(key, run, brokers.found[run.broker])
        finally:
            if results:
                # What was measured until somebody pressed Ctrl-C is worth having, too.
                write(given, brokers, results)


def turns(
    given: argparse.Namespace, brokers: servers.Brokers
) -> Iterator[tuple[tuple[str, str, int], plan.Run]]:
    """Go through all repeats, and in each through all measures, and in each through all sides."""
    for repeat in range(given.repeats):
        for each in given.measures:
            if repeat < each.at_most:
                for run in each.runs:
                    if run.broker in brokers.found:
                        yield (each.name, run.side, repeat), run


def measure(key: tuple[str, str, int], run: plan.Run, broker: servers.Broker) -> dict[str, Any]:
    """Measure one side once."""
    if left := servers.remove_leased(broker):
        print(f"   {left} messages of an earlier measure removed", flush=True)
    began = time.monotonic()
    found = child.measure(run.function, run.arguments, broker.url, broker.options)
    name, side, repeat = key
    shown = ", ".join(
        f"{figure} {report.number(value) if isinstance(value, (int, float)) else value}"
        for figure, value in found.items()
    )
    took = time.monotonic() - began
    print(f"{repeat + 1}  {name:16} {side:16} {took:5.1f} s  {shown}", flush=True)
    return found


def write(given: argparse.Namespace, brokers: servers.Brokers, results: Results) -> None:
    """Write the results in all forms."""
    about = describe(given, brokers)
    rows = [
        {"measure": name, "side": side, "repeat": repeat, **figures}
        for (name, side, repeat), figures in results.items()
    ]
    (given.out / "results.json").write_text(
        json.dumps({**about, "results": rows}, indent=1, ensure_ascii=False), "utf-8"
    )
    lines = [f"{name}: {value}" for name, value in caption(about).items()]
    text = report.write(given.measures, results, lines)
    (given.out / "results.md").write_text(text, "utf-8")
    picture = given.out / "results.png"
    drawn = chart.draw(given.measures, results, ". ".join(lines), picture)
    print(f"\n{text}\nAlso in {given.out}: results.json{', results.png' if drawn else ''}")


def describe(given: argparse.Namespace, brokers: servers.Brokers) -> dict[str, Any]:
    """Return what was measured with what."""
    return {
        "machine": machine.describe(),
        "servers": {broker.title: broker.version for broker in brokers.found.values()},
        "left_out": list(brokers.missing.values()),
        "postgresql_settings": brokers.settings,
        "quick": given.quick,
        "repeats": given.repeats,
        "arguments": {
            each.name: {run.side: run.arguments for run in each.runs} for each in given.measures
        },
    }


def caption(about: dict[str, Any]) -> dict[str, str]:
    """Say it in a few lines."""
    known, found = about["machine"], about["servers"]
    settings = ", ".join(f"{name} {value}" for name, value in about["postgresql_settings"].items())
    lines = {
        "Machine": f"{known['cpu']}, {known['cores']} cores, {known['kernel']}",
        "PostgreSQL": f"{found['kombu_pgnotify']} ({settings})",
        "Others": ", ".join(
            f"{title} {version}"
            for title, version in found.items()
            if title in ("Redis", "RabbitMQ")
        )
        or "none",
        "Python": f"{known['python']}, kombu {known['kombu']}, Celery {known['celery']},"
        f" psycopg {known['psycopg']}, kombu-pgnotify {known['kombu-pgnotify']}",
        "Repeats": str(about["repeats"]) + (", quick: not to be quoted" if about["quick"] else ""),
        "Messages": "durable, JSON, the same for all",
    }
    if about["left_out"]:
        lines["Left out"] = "; ".join(about["left_out"])
    return lines


if __name__ == "__main__":
    main()
