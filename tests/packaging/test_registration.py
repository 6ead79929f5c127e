"""The wheel, installed beside Celery in a clean environment: who finds ``pgnotify://``, and when.

Each case runs in an interpreter of its own, since what is imported first decides. All of them run
with Celery and kombu 5.5, 5.6 and the newest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# A fixture may build an environment from the package index first.
pytestmark = pytest.mark.timeout(300)

REPOSITORY = Path(__file__).parents[2]
TRANSPORT = "kombu_pgnotify.transport:Transport"
#: Nobody listens on port 1.
CLOSED_PORT = "pgnotify://nobody@127.0.0.1:1/nowhere"
#: Seconds for a worker to start and to stop: generous, a test ends as soon as it has.
PATIENCE = 60

#: Prints where the transport of a `connection` comes from.
PRINT_TRANSPORT = """
transport = type(connection.transport)
print(f"{transport.__module__}:{transport.__name__}")
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with Celery and our wheel, and an empty folder to work in."""

    root: Path
    folder: Path
    extra_path: Path | None = None

    def with_path(self, path: Path) -> Environment:
        """Return the same environment with a folder that comes before what is installed."""
        return Environment(self.root, self.folder, path)

    def command(self, name: str) -> str:
        """Return the path of a program of this environment."""
        return str(self.root / "bin" / name)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables: without those that would let the checkout be imported."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CELERY"))}
        variables["C_FORCE_ROOT"] = "1"
        if self.extra_path:
            variables["PYTHONPATH"] = str(self.extra_path)
        return variables

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment to its end."""
        return subprocess.run(
            [self.command(name), *arguments],
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )

    def python(self, code: str) -> str:
        """Return what the code prints in a fresh interpreter; fail if it fails."""
        done = self.run("python", "-c", textwrap.dedent(code))
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()


def _run_pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", *arguments]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout: a build leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(
        REPOSITORY / "kombu_pgnotify",
        source / "kombu_pgnotify",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("setup.cfg", "pyproject.toml", "README.rst", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    target = tmp_path_factory.mktemp("wheel")
    _run_pip("wheel", "--no-deps", "--wheel-dir", str(target), str(source))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session", params=["5.5.*", "5.6.*", "<6"], ids=["5.5", "5.6", "newest"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A virtual environment with our wheel and one release of Celery, and kombu to match."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True, with_pip=False)
    release = request.param if request.param.startswith("<") else f"=={request.param}"
    python = str(root / "bin" / "python")
    _run_pip("--python", python, "install", str(wheel), f"celery{release}")
    return root


@pytest.fixture
def environment(installed: Path, tmp_path: Path) -> Environment:
    """The clean environment, working in an empty folder of the test's own."""
    return Environment(installed, tmp_path)


# Who finds the scheme.


def test_bare_connection_needs_the_import(environment: Environment) -> None:
    """kombu alone has loaded nothing of ours yet: the one documented case."""
    code = """
    from kombu import Connection
    try:
        Connection("pgnotify://h")
    except KeyError as error:
        print(error)
    """
    assert "No such transport: pgnotify" in environment.python(code)


def test_bare_connection_with_the_import(environment: Environment) -> None:
    code = """
    import kombu_pgnotify
    from kombu import Connection
    connection = Connection("pgnotify://h")
    """
    assert environment.python(textwrap.dedent(code) + PRINT_TRANSPORT) == TRANSPORT


def test_import_after_a_failed_look_up(environment: Environment) -> None:
    """kombu does not remember that it did not find the scheme."""
    code = """
    from kombu import Connection
    try:
        Connection("pgnotify://h")
    except KeyError:
        import kombu_pgnotify
    connection = Connection("pgnotify://h")
    """
    assert environment.python(textwrap.dedent(code) + PRINT_TRANSPORT) == TRANSPORT


def test_connection_beside_queue_and_producer(environment: Environment) -> None:
    code = """
    from kombu import Connection, Producer, Queue
    connection = Connection("pgnotify://h")
    """
    assert environment.python(textwrap.dedent(code) + PRINT_TRANSPORT) == TRANSPORT


def test_connection_of_an_application(environment: Environment) -> None:
    code = """
    from celery import Celery
    connection = Celery(broker="pgnotify://h").connection_for_write()
    """
    assert environment.python(textwrap.dedent(code) + PRINT_TRANSPORT) == TRANSPORT


@pytest.mark.parametrize("backend", [None, "rpc://", "cache+memory://"])
def test_send_task(environment: Environment, backend: str | None) -> None:
    """A closed port is a connection error: the scheme was found, and something was tried."""
    code = f"""
    from celery import Celery
    from kombu.exceptions import OperationalError
    app = Celery(broker={CLOSED_PORT!r}, backend={backend!r})
    # Without a limit kombu connects again for ever.
    app.conf.broker_transport_options = {{"max_retries": 1, "interval_start": 0}}
    try:
        app.send_task("tasks.add", retry=False)
    except OperationalError:
        print("connection error")
    """
    assert environment.python(code) == "connection error"


def test_connection_below_the_command_line(environment: Environment) -> None:
    code = """
    import celery.bin.celery
    from kombu import Connection
    connection = Connection("pgnotify://h")
    """
    assert environment.python(textwrap.dedent(code) + PRINT_TRANSPORT) == TRANSPORT


def test_command_without_an_application(environment: Environment) -> None:
    """`celery report` makes a connection object for its broker line, and connects nowhere."""
    report = environment.run("celery", "-b", CLOSED_PORT, "report")
    assert report.returncode == 0, report.stdout
    assert "pgnotify" in report.stdout


def test_inspect_without_an_application(environment: Environment, broker_url: str) -> None:
    inspect = environment.run("celery", "-b", broker_url, "inspect", "ping", "--timeout", "1")
    assert "No nodes replied" in inspect.stdout


def test_spawned_child(environment: Environment) -> None:
    """A spawned process imports everything anew, and inherits no alias."""
    script = """
    import multiprocessing
    from celery import Celery

    def print_transport():
        connection = Celery(broker="pgnotify://h").connection_for_write()
        print(type(connection.transport).__module__, flush=True)

    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=print_transport)
        child.start()
        child.join()
    """
    (environment.folder / "parent.py").write_text(textwrap.dedent(script))
    done = environment.run("python", "parent.py")
    assert done.stdout.strip() == "kombu_pgnotify.transport"


@dataclass(frozen=True)
class Worker:
    """A started worker, and what it printed until it was ready."""

    process: subprocess.Popen[str]
    printed: str


@pytest.fixture
def worker(environment: Environment, broker_url: str) -> Iterator[Worker]:
    """A worker of an application that names the URL and imports nothing of ours."""
    (environment.folder / "tasks.py").write_text(
        f"from celery import Celery\n\napp = Celery('tasks', broker={broker_url!r})\n"
    )
    process = subprocess.Popen(
        [environment.command("celery"), "-A", "tasks", "worker", "-P", "solo", "-l", "INFO"],
        cwd=environment.folder,
        env=environment.variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(2 * PATIENCE, process.kill)
    watchdog.start()
    try:
        printed = ""
        for line in process.stdout:
            printed += line
            if "ready." in line:
                break
        yield Worker(process, printed)
        process.terminate()
        process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_worker(environment: Environment, worker: Worker) -> None:
    assert "Connected to pgnotify://" in worker.printed
    assert " ready." in worker.printed


def test_transport_by_its_path(environment: Environment) -> None:
    code = f"""
    from celery import Celery
    app = Celery(broker="pgnotify://h")
    app.conf.broker_transport = {TRANSPORT!r}
    connection = app.connection_for_write()
    """
    assert environment.python(textwrap.dedent(code) + PRINT_TRANSPORT) == TRANSPORT


def test_alias_of_somebody_else_stays(environment: Environment) -> None:
    code = """
    from kombu.transport import TRANSPORT_ALIASES
    TRANSPORT_ALIASES["pgnotify"] = "mine:Transport"
    import celery, kombu.serialization, kombu_pgnotify
    print(TRANSPORT_ALIASES["pgnotify"])
    """
    assert environment.python(code) == "mine:Transport"


# What it must not do to anybody.


@pytest.mark.parametrize(
    "first", ["kombu_pgnotify", "kombu_pgnotify._register", "kombu.serialization", "celery"]
)
def test_imports_nothing_that_gevent_must_patch_before(
    environment: Environment, first: str
) -> None:
    code = f"""
    import sys
    import {first}
    import kombu.serialization
    from kombu.transport import TRANSPORT_ALIASES
    unwanted = {{"celery", "gevent", "psycopg", "psycopg_c", "sqlalchemy"}} - {{{first!r}}}
    print(TRANSPORT_ALIASES["pgnotify"], sorted(unwanted & set(sys.modules)))
    """
    assert environment.python(code) == f"{TRANSPORT} []"


def test_broken_transport_does_not_break_celery(environment: Environment) -> None:
    package = Path(environment.python("import kombu_pgnotify as p; print(p.__path__[0])"))
    broken = environment.folder / "broken"
    shutil.copytree(package, broken / "kombu_pgnotify")
    (broken / "kombu_pgnotify" / "transport.py").write_text("raise RuntimeError('broken')\n")
    code = """
    from celery import Celery
    app = Celery(broker="memory://")
    app.send_task("tasks.add")
    print("sent")
    import kombu_pgnotify
    print(kombu_pgnotify.__path__[0])
    """
    printed = environment.with_path(broken).python(code)
    assert printed.split() == ["sent", str(broken / "kombu_pgnotify")]


def test_unknown_kombu_does_not_break_celery(environment: Environment) -> None:
    """A kombu without the table of aliases: one warning that says why, and Celery goes on."""
    code = """
    import kombu.transport
    del kombu.transport.TRANSPORT_ALIASES
    import celery, kombu.serialization
    print("imported", celery.Celery)
    """
    printed = environment.python(code)
    assert "imported" in printed
    assert printed.count("transport_alias_not_registered") == 1


def test_serializer_is_plain_json(environment: Environment) -> None:
    code = r"""
    from kombu.serialization import dumps, loads
    value = {"a": [1, -2.5, None, True, "caf\u00e9 \u0000 \ud800"], "__type__": "date"}
    content_type, encoding, text = dumps(value, serializer="pgnotify-json")
    print(content_type, encoding)
    print(loads(text, content_type, encoding, accept=[content_type]) == value)
    print(loads(text.encode(), content_type, encoding, accept=[content_type]) == value)
    """
    assert environment.python(code).split() == [
        "application/x-pgnotify-json",
        "utf-8",
        "True",
        "True",
    ]


@pytest.mark.parametrize("value", ["float('nan')", "object()", "datetime.date(2026, 1, 1)"])
def test_serializer_refuses_what_json_cannot_say(environment: Environment, value: str) -> None:
    code = f"""
    import datetime
    from kombu.exceptions import EncodeError
    from kombu.serialization import dumps
    try:
        print(dumps({value}, serializer="pgnotify-json"))
    except EncodeError:
        print("refused")
    """
    assert environment.python(code) == "refused"


def test_serializer_changes_no_other(environment: Environment) -> None:
    """The default one and the names stay; ours is in use only where it is asked for."""
    code = """
    import kombu.utils.json
    from celery import Celery
    from kombu.serialization import dumps, registry
    print(dumps({"a": 1})[0], dumps({"a": 1}, serializer="json")[0])
    print(registry.type_to_name["application/json"], registry.name_to_type["json"])
    print(registry._encoders["json"].encoder is kombu.utils.json.dumps)
    print(*Celery().conf.accept_content)
    """
    assert environment.python(code).splitlines() == [
        "application/json application/json",
        "json application/json",
        "True",
        "json",
    ]


# What is in the wheel.


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    package = REPOSITORY / "kombu_pgnotify"
    in_checkout = {
        str(path.relative_to(REPOSITORY))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    in_wheel = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name and not name.endswith("/")
    }
    assert in_wheel == in_checkout
    assert "kombu_pgnotify/py.typed" in in_wheel


def test_version_of_the_metadata(environment: Environment) -> None:
    code = """
    import importlib.metadata, kombu_pgnotify
    print(importlib.metadata.version("kombu-pgnotify") == kombu_pgnotify.__version__)
    """
    assert environment.python(code) == "True"
