"""The rooms: imports go one way, modules stay small, SQL stays in its file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kombu_pgnotify
from kombu_pgnotify import sql as queries

PACKAGE = Path(kombu_pgnotify.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

#: From bottom to top: a module imports only from rows above its own.
FLOORS = [
    {"sql", "errors", "waker", "wire", "claims", "urls", "notices", "embedded", "messages"},
    {"options", "session"},
    {"schema", "flight"},
    {"pool"},
    {"database"},
    {"store", "listener", "leases"},
    {"aftermath", "topology", "dead_letters"},
    {"settling"},
    {"claiming"},
    {"keeper", "live", "housekeeper"},
    {"broker"},
]
LOWER = set().union(*FLOORS)

#: Within a floor, who may import whom.
WITHIN = {("urls", "errors"), ("session", "sql")}

MAX_MODULE = 400  # lines
MAX_FUNCTION = 60  # lines

FORBIDDEN_BELOW = {"kombu", "celery", "amqp", "vine", "billiard"}

#: What gevent and eventlet must be able to patch for before it is imported.
FORBIDDEN_AT_FIRST = ("psycopg", "sqlalchemy", "celery", "gevent", "eventlet")

BLOCKED_PROGRAM = """
import importlib.machinery, sys, types

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Refuse())
# The package without its __init__, which registers the transport with kombu.
package = types.ModuleType("kombu_pgnotify")
package.__path__ = [{path!r}]
sys.modules["kombu_pgnotify"] = package
for name in {modules!r}:
    __import__("kombu_pgnotify." + name)
"""


def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports_of(name: str, *, top_only: bool = False) -> set[str]:
    """Absolute names of what a module imports; of our own modules as `kombu_pgnotify.x`."""
    tree = tree_of(name)
    found: set[str] = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"kombu_pgnotify.{base}".rstrip(".")
            found.add(base)
            if base == "kombu_pgnotify":
                found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def ours(name: str) -> set[str]:
    prefix = "kombu_pgnotify."
    names = {found.removeprefix(prefix) for found in imports_of(name) if found.startswith(prefix)}
    return {found for found in names if found in MODULES}


def test_every_module_of_the_lower_half_exists() -> None:
    assert set(MODULES) >= LOWER


@pytest.mark.parametrize("name", sorted(LOWER))
def test_the_lower_half_imports_neither_kombu_nor_celery(name: str) -> None:
    tops = {found.partition(".")[0] for found in imports_of(name)}
    assert tops & FORBIDDEN_BELOW == set()


def test_the_lower_half_works_where_kombu_and_celery_are_not_installed() -> None:
    program = BLOCKED_PROGRAM.format(
        forbidden=FORBIDDEN_BELOW, path=str(PACKAGE), modules=sorted(LOWER)
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


#: What kombu's users who have no Celery import all the same, by way of the transport.
FOR_CELERY = sorted(name for name in MODULES if name.partition(".")[0] == "celery")


def test_what_is_celerys_is_there() -> None:
    assert "celery.worker" in FOR_CELERY


@pytest.mark.parametrize("name", FOR_CELERY)
def test_what_is_celerys_imports_nothing_of_celery_when_it_is_imported(name: str) -> None:
    """Not even within `if` or `try`: in a worker it would come too early, elsewhere in vain."""
    tree = tree_of(name)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in inside:
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            assert {found.partition(".")[0] for found in names} & FORBIDDEN_BELOW == set()


def test_the_transport_works_where_celery_is_not_installed() -> None:
    modules = [name for name in MODULES if not name.startswith("demo") and name != "__main__"]
    program = BLOCKED_PROGRAM.format(
        forbidden={"celery"}, path=str(PACKAGE), modules=sorted(modules)
    )
    program += "\nassert not [name for name in sys.modules if name.partition('.')[0] == 'celery']"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("floor", "name"), [(n, m) for n, f in enumerate(FLOORS) for m in sorted(f)]
)
def test_imports_go_one_way(floor: int, name: str) -> None:
    below = set().union(*FLOORS[:floor])
    allowed = below | {other for one, other in WITHIN if one == name}
    assert ours(name) <= allowed


def test_no_module_imports_in_a_circle() -> None:
    graph = {name: ours(name) - {name} for name in MODULES}
    for name in MODULES:
        # What a type checker alone sees is no import.
        if "TYPE_CHECKING" in MODULES[name].read_text(encoding="utf-8"):
            graph[name] = {
                found.removeprefix("kombu_pgnotify.")
                for found in imports_of(name, top_only=True)
                if found.removeprefix("kombu_pgnotify.") in MODULES
            }
    done: set[str] = set()
    while graph:
        leaves = {name for name, imported in graph.items() if imported <= done}
        assert leaves, f"a circle among {sorted(graph)}"
        done |= leaves
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


def test_importing_the_package_imports_no_driver() -> None:
    program = (
        f"import sys, kombu_pgnotify;print([m for m in {FORBIDDEN_AT_FIRST!r} if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    assert output.strip() == "[]"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_and_functions_stay_small(name: str) -> None:
    text = MODULES[name].read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_MODULE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


# -- SQL

QUERIES = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((PACKAGE / "sql").glob("*.sql"))
)
NAMES = re.findall(r"^-- name: (\w+)$", QUERIES, re.MULTILINE)


def used_names() -> set[str]:
    """Every text in the code that is used as the name of a statement."""
    found: set[str] = set()
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.slice, ast.Constant)
                and isinstance(node.slice.value, str)
                and re.search(r"statements|known", ast.unparse(node.value))
            ):
                found.add(node.slice.value)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("_settle", "_settling", "_run")
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def test_each_statement_is_used_and_each_used_one_exists() -> None:
    assert len(NAMES) == len(set(NAMES))
    used = used_names()
    assert set(NAMES) <= used, "statements that nobody uses"
    # `known` is also the name of other dictionaries, so this way round by our own loader.
    assert set(queries.statements("s")) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_statement_says_in_a_sentence_what_it_does(name: str) -> None:
    block = QUERIES.partition(f"-- name: {name}\n")[2].partition("\n-- name: ")[0]
    comment = re.match(r"(-- .*\n)+", block)
    assert comment, f"{name} has no sentence"
    assert re.search(r"[.:]\n$", comment[0])
    assert comment[0][3].isupper()


@pytest.mark.parametrize("name", NAMES)
def test_each_statement_is_one_and_uses_all_its_parameters(name: str) -> None:
    text = queries.statements("s")[name].sql.decode()
    assert ";" not in text
    assert "--" not in text
    assert "{schema}" not in text
    numbers = {int(number) for number in re.findall(r"\$(\d+)", text)}
    assert numbers == set(range(1, len(numbers) + 1))


SQL_WORDS = re.compile(
    r"^\s*(SELECT|INSERT INTO|UPDATE \S+ SET|DELETE FROM|CREATE|ALTER|DROP|LISTEN|UNLISTEN|NOTIFY|"
    r"BEGIN|COMMIT|SET)\b"
)

#: Statements made of text in the code: identifiers quoted by `quote_identifier`, numbers of ours.
MADE_OF_TEXT = {
    "schema": {
        "CREATE SCHEMA IF NOT EXISTS {sql.quote_identifier(schema)};",
        "CREATE SCHEMA {quoted}",
        "BEGIN; {_PINNED}; SELECT pg_advisory_xact_lock({_lock_key(schema)})",
        "\nINSERT INTO {quoted}.migrations (version) VALUES ({version});",
    },
    "listener": {"LISTEN {quote_identifier(name)}", "UNLISTEN {quote_identifier(name)}"},
}


def sql_texts(name: str) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
                if isinstance(part, (ast.Constant, ast.FormattedValue))
            ]
            text = "".join(map(str, parts))
            if SQL_WORDS.match(text):
                found.add(text)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.Add)):
            left = node.left
            if isinstance(left, ast.Constant) and SQL_WORDS.match(str(left.value)):
                found.add(ast.unparse(node))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "format"
            and SQL_WORDS.match(str(getattr(node.func.value, "value", "")))
        ):
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.startswith("demo")))
def test_no_value_is_written_into_sql(name: str) -> None:
    assert sql_texts(name) <= MADE_OF_TEXT.get(name, set())


def test_migrations_are_numbered_without_gaps() -> None:
    assert list(queries.migrations()) == list(range(1, len(queries.migrations()) + 1))


def test_an_identifier_keeps_every_character() -> None:
    assert queries.quote_identifier('we"ird') == '"we""ird"'
