"""Every form of a broker URL, and that no password is ever shown."""

from __future__ import annotations

import copy
import pickle
import ssl
import traceback
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings, strategies as st
from kombu import Connection

import kombu_pgnotify  # noqa: F401 - registers the scheme
from kombu_pgnotify import options, urls
from kombu_pgnotify.errors import ConfigurationError
from kombu_pgnotify.options import NAMES, Options
from kombu_pgnotify.transport import Transport, _options_of
from kombu_pgnotify.urls import Target

SECRET = "Sesame-7291"

ODD_PASSWORDS = [
    "a@b", "a:b", "a/b", "a#b", "a%b", "a+b", "a b", "a?b", "a;b", "a&b=c", "a%40b", "pä§ß", "密码",
    "😀", "a'b", 'a"b', "a\\b", " ", "[x]", "//", "@", ":", "host=evil", "**",
]  # fmt: skip


def read(connection: Connection) -> Options:
    """What the transport makes of a kombu Connection, which is never connected."""
    assert isinstance(connection.transport, Transport)
    return _options_of(connection)


def target_of(url: str, **fields: Any) -> Target:
    return read(Connection(url, **fields)).target


def params_of(url: str, **fields: Any) -> dict[str, str]:
    return target_of(url, **fields).params


# -- forms


@pytest.mark.parametrize(
    ("url", "params", "password"),
    [
        ("pgnotify://", {}, None),
        ("pgnotify:///", {}, None),
        ("pgnotify:///db", {"dbname": "db"}, None),
        ("pgnotify://h", {"host": "h"}, None),
        ("pgnotify://h/", {"host": "h"}, None),
        ("pgnotify://h:5433/db", {"host": "h", "port": "5433", "dbname": "db"}, None),
        ("pgnotify://:5433/db", {"port": "5433", "dbname": "db"}, None),
        ("pgnotify://u@h/db", {"host": "h", "user": "u", "dbname": "db"}, None),
        ("pgnotify://u:p@h/db", {"host": "h", "user": "u", "dbname": "db"}, "p"),
        ("pgnotify://u:@h/db", {"host": "h", "user": "u", "dbname": "db"}, ""),
        ("pgnotify://:p@h/db", {"host": "h", "dbname": "db"}, "p"),
        ("pgnotify://u:p@/db", {"user": "u", "dbname": "db"}, "p"),
        (
            "pgnotify://u%40corp:p@h/db%2Fone",
            {"host": "h", "user": "u@corp", "dbname": "db/one"},
            "p",
        ),
        # several hosts, in libpq's way, in the query and in SQLAlchemy's
        (
            "pgnotify://h1:5433,h2:5434/db",
            {"host": "h1,h2", "port": "5433,5434", "dbname": "db"},
            None,
        ),
        ("pgnotify://h1,h2:5434/db", {"host": "h1,h2", "port": ",5434", "dbname": "db"}, None),
        ("pgnotify://u:p@h1,h2/db", {"host": "h1,h2", "user": "u", "dbname": "db"}, "p"),
        (
            "pgnotify://u:p@/db?host=h1,h2&port=5432,5433",
            {"host": "h1,h2", "port": "5432,5433", "user": "u", "dbname": "db"},
            "p",
        ),
        (
            "pgnotify:///db?host=h1:5433&host=h2:5434",
            {"host": "h1,h2", "port": "5433,5434", "dbname": "db"},
            None,
        ),
        (
            "pgnotify:///db?host=h1&host=h2&port=5433",
            {"host": "h1,h2", "port": "5433", "dbname": "db"},
            None,
        ),
        # IPv6
        ("pgnotify://[::1]/db", {"host": "::1", "dbname": "db"}, None),
        (
            "pgnotify://u:p@[2001:db8::1]:5433/db",
            {"host": "2001:db8::1", "port": "5433", "user": "u", "dbname": "db"},
            "p",
        ),
        (
            "pgnotify://[::1]:5433,h2:5434/db",
            {"host": "::1,h2", "port": "5433,5434", "dbname": "db"},
            None,
        ),
        ("pgnotify:///db?host=::1", {"host": "::1", "dbname": "db"}, None),
        # sockets
        ("pgnotify:///db?host=/run/postgresql", {"host": "/run/postgresql", "dbname": "db"}, None),
        (
            "pgnotify:///db?host=%2Frun%2Fpostgresql",
            {"host": "/run/postgresql", "dbname": "db"},
            None,
        ),
        ("pgnotify://%2Frun%2Fpostgresql/db", {"host": "/run/postgresql", "dbname": "db"}, None),
        (
            "pgnotify://u@%2Frun%2Fpostgresql:5433/db",
            {"host": "/run/postgresql", "port": "5433", "user": "u", "dbname": "db"},
            None,
        ),
        (
            "pgnotify:///db?host=/run/postgresql&port=5433",
            {"host": "/run/postgresql", "port": "5433", "dbname": "db"},
            None,
        ),
        # any parameter of libpq
        (
            "pgnotify://h/db?sslmode=verify-full&sslrootcert=/ca.pem",
            {"host": "h", "dbname": "db", "sslmode": "verify-full", "sslrootcert": "/ca.pem"},
            None,
        ),
        (
            "pgnotify://h/db?target_session_attrs=read-write",
            {"host": "h", "dbname": "db", "target_session_attrs": "read-write"},
            None,
        ),
        (
            "pgnotify://h/db?options=-c%20search_path%3Dx",
            {"host": "h", "dbname": "db", "options": "-c search_path=x"},
            None,
        ),
        (
            "pgnotify://h/db?hostaddr=10.0.0.1&keepalives=0",
            {"host": "h", "dbname": "db", "hostaddr": "10.0.0.1", "keepalives": "0"},
            None,
        ),
        ("pgnotify:///?service=prod", {"service": "prod"}, None),
        ("pgnotify:///db?user=u&password=p", {"dbname": "db", "user": "u"}, "p"),
        ("pgnotify:///?dbname=db", {"dbname": "db"}, None),
        ("pgnotify:///?passfile=/secrets/pgpass", {"passfile": "/secrets/pgpass"}, None),
        # the form of other libraries
        ("pgnotify+postgresql://u:p@h/db", {"host": "h", "user": "u", "dbname": "db"}, "p"),
        (
            "pgnotify+postgresql+psycopg://u:p@h:5433/db?sslmode=require",
            {"host": "h", "port": "5433", "user": "u", "dbname": "db", "sslmode": "require"},
            "p",
        ),
    ],
)
def test_every_form_of_a_url_reaches_libpq(
    url: str, params: dict[str, str], password: str | None
) -> None:
    target = target_of(url)
    assert target.params == params
    assert target.password == password


@pytest.mark.parametrize("password", ODD_PASSWORDS)
def test_a_percent_encoded_password_is_what_it_was(password: str) -> None:
    target = target_of(f"pgnotify://u:{quote(password, safe='')}@h:1/db?sslmode=disable")
    assert target.password == password
    assert target.params == {
        "host": "h", "port": "1", "user": "u", "dbname": "db", "sslmode": "disable",
    }  # fmt: skip


@pytest.mark.parametrize("password", ["a@b", "a:b", "a/b", "a#b", "a b", "pä§ß", "a+b", "a@b:c"])
def test_a_password_that_somebody_forgot_to_encode_is_understood(password: str) -> None:
    target = target_of(f"pgnotify://u:{password}@h/db")
    assert (target.password, target.params["host"]) == (password, "h")


@pytest.mark.parametrize("password", ["part1@part2/part3", "part1/part2@part3"])
def test_an_ambiguous_url_shows_no_piece_of_its_password(password: str) -> None:
    connection = Connection(f"pgnotify://u:{password}@h/db")
    shown = connection.as_uri() + repr(connection) + str(connection.transport.client.hostname)
    assert "part" not in shown


def test_a_question_mark_in_the_password_is_named_but_not_its_rest() -> None:
    with pytest.raises(ConfigurationError, match="%3F") as error:
        target_of(f"pgnotify://u:a?{SECRET}@h/db")
    assert SECRET not in str(error.value)


def test_a_question_mark_in_the_password_lets_nothing_of_it_be_shown() -> None:
    connection = Connection(f"pgnotify://u:part1?{SECRET}@h/db")
    shown = connection.as_uri() + repr(connection) + str(connection.hostname)
    assert SECRET not in shown
    assert "part1" not in shown


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1", "5432x", "١"])
def test_a_wrong_port_is_a_sentence_that_shows_no_password(port: str) -> None:
    with pytest.raises(ConfigurationError, match="port") as error:
        target_of(f"pgnotify://u:{SECRET}@h:{port}/db")
    assert SECRET not in str(error.value)


# -- next to a URL


def test_separate_settings_fill_in_what_the_url_leaves_out() -> None:
    target = target_of("pgnotify://h", userid="u", password="p", virtual_host="db", port=5433)
    assert target.params == {"host": "h", "port": "5433", "user": "u", "dbname": "db"}
    assert target.password == "p"


def test_the_url_wins_over_separate_settings() -> None:
    target = target_of(
        "pgnotify://u:p@h:1/db", userid="other", password="other", virtual_host="x", port=2
    )
    assert target.params == {"host": "h", "port": "1", "user": "u", "dbname": "db"}
    assert target.password == "p"


def test_settings_without_any_url_are_enough() -> None:
    target = target_of(
        "h", transport="pgnotify", userid="u", password="p", virtual_host="/db", port=5433
    )
    assert target.params == {"host": "h", "port": "5433", "user": "u", "dbname": "db"}
    assert target.password == "p"


def test_kombus_own_virtual_host_is_no_database() -> None:
    assert params_of("pgnotify://h", virtual_host="/") == {"host": "h"}


def test_a_callable_password_is_asked_at_each_connect_and_not_before() -> None:
    asked: list[int] = []

    def password() -> str:
        asked.append(1)
        return SECRET

    connection = Connection("pgnotify://u@h/db", password=password)
    found = read(connection)
    assert found.password_source is password
    assert found.target.password is None
    assert SECRET not in connection.as_uri() + repr(connection)
    assert not asked
    assert SECRET in connection.as_uri(include_password=True)


# -- failover


def test_failover_takes_every_url_in_turn() -> None:
    connection = Connection("pgnotify://u1:p1@h1:1/db1;pgnotify://u2:p2@h2:2/db2")
    first = {"host": "h1", "port": "1", "user": "u1", "dbname": "db1"}
    second = {"host": "h2", "port": "2", "user": "u2", "dbname": "db2"}
    for params, password in ((first, "p1"), (second, "p2"), (first, "p1"), (second, "p2")):
        target = read(connection).target
        assert (target.params, target.password) == (params, password)
        shown = connection.as_uri()
        assert f"{params['user']}:**@{params['host']}:{params['port']}/{params['dbname']}" in shown
        assert connection.as_uri(include_password=True) == (
            f"pgnotify://{params['user']}:{password}@{params['host']}:{params['port']}"
            f"/{params['dbname']}"
        )
        connection.maybe_switch_next()


def test_failover_to_a_list_of_urls() -> None:
    connection = Connection(["pgnotify://u:p@h1/db", "pgnotify://u:p@h2/db"])
    assert read(connection).target.params["host"] == "h1"
    connection.maybe_switch_next()
    assert read(connection).target.params["host"] == "h2"


@pytest.mark.parametrize("password", ODD_PASSWORDS)
def test_an_odd_password_survives_failover(password: str) -> None:
    alternate = f"pgnotify://u:{quote(password, safe='')}@h2/db"
    connection = Connection(f"pgnotify://h1;{alternate}")
    connection.switch(alternate)
    assert read(connection).target.password == password
    if len(password) > 2:
        assert password not in connection.as_uri()
    again = Connection(connection.as_uri(include_password=True))
    assert read(again).target.password == password


def test_failover_keeps_transport_options() -> None:
    connection = Connection("pgnotify://h1;pgnotify://h2", transport_options={"schema": "s"})
    connection.maybe_switch_next()
    assert read(connection).schema == "s"


def test_a_clone_can_fail_over_too() -> None:
    connection = Connection("pgnotify://u:p@h1/db;pgnotify://v:q@h2/db").clone()
    assert read(connection).target.password == "p"
    connection.maybe_switch_next()
    target = read(connection).target
    assert (target.params["host"], target.params["user"], target.password) == ("h2", "v", "q")


# -- broker_use_ssl


@pytest.mark.parametrize(
    ("given_ssl", "params"),
    [
        (False, {}),
        (None, {}),
        ({}, {}),
        (True, {"sslmode": "require"}),
        # redis
        (
            {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca", "ssl_certfile": "/c"},
            {"sslmode": "verify-full", "sslrootcert": "/ca", "sslcert": "/c"},
        ),
        ({"ssl_cert_reqs": "none"}, {"sslmode": "require"}),
        ({"ssl_cert_reqs": "CERT_OPTIONAL"}, {"sslmode": "verify-ca"}),
        ({"ssl_cert_reqs": "required", "ssl_check_hostname": False}, {"sslmode": "verify-ca"}),
        ({"ssl_cert_reqs": "required", "ssl_check_hostname": True}, {"sslmode": "verify-full"}),
        # amqp
        (
            {"keyfile": "/k", "certfile": "/c", "ca_certs": "/ca", "cert_reqs": ssl.CERT_REQUIRED},
            {"sslmode": "verify-full", "sslkey": "/k", "sslcert": "/c", "sslrootcert": "/ca"},
        ),
        # libpq
        (
            {"sslmode": "verify-ca", "sslrootcert": "/ca"},
            {"sslmode": "verify-ca", "sslrootcert": "/ca"},
        ),
        (
            {"sslcert": "/c", "sslkey": "/k"},
            {"sslmode": "require", "sslcert": "/c", "sslkey": "/k"},
        ),
    ],
)
def test_broker_use_ssl_in_the_words_of_every_broker(
    given_ssl: Any, params: dict[str, str]
) -> None:
    assert params_of("pgnotify://h", ssl=given_ssl) == {"host": "h", **params}


def test_ssl_settings_of_the_url_win() -> None:
    given_ssl = {"cert_reqs": ssl.CERT_NONE}
    assert params_of("pgnotify://h?sslmode=verify-full", ssl=given_ssl)["sslmode"] == "verify-full"


@pytest.mark.parametrize(
    ("given_ssl", "words"),
    [
        ({"ca_cert": "/ca"}, ["ca_cert", "ca_certs"]),
        ({"ssl_version": 2}, ["version"]),
        ({"cert_reqs": "sometimes"}, ["cert_reqs", "sometimes"]),
    ],
)
def test_a_wrong_key_of_broker_use_ssl_is_named(given_ssl: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        params_of("pgnotify://h", ssl=given_ssl)
    assert all(word in str(error.value) for word in words)


# -- wrong parameters


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("sslmod=require", ["'sslmod'", "'sslmode'"]),
        ("visibility_timout=3", ["'visibility_timout'", "'visibility_timeout'"]),
        ("whatever=1", ["'whatever'"]),
        ("client_encoding=latin1", ["'client_encoding'", "UTF-8"]),
        ("replication=database", ["'replication'"]),
        (f"sslpassword={SECRET}", ["'sslpassword'", "service"]),
    ],
)
def test_a_wrong_parameter_is_named_with_its_near_miss(query: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        target_of(f"pgnotify://u:{SECRET}@h/db?{query}")
    text = str(error.value)
    assert all(word in text for word in words)
    assert SECRET not in text


def test_the_query_may_hold_options_of_ours() -> None:
    found = read(Connection("pgnotify://h?visibility_timeout=7.5&notify=false&schema=s"))
    assert (found.visibility_timeout, found.notify, found.schema) == (7.5, False, "s")
    assert found.target.params == {"host": "h"}


# -- passwords stay hidden


def shown_by(connection: Connection) -> str:
    """Everything that people and monitoring see of a connection."""
    info = connection.info()
    # What Celery's `inspect stats` takes out itself.
    info.pop("password", None)
    transport: Transport = connection.transport
    found = read(connection)
    seen = [
        connection.as_uri(), repr(connection), str(connection), str(info), connection.hostname,
        repr(transport), repr(found), str(found), repr(found.target), found.target.describe(),
        connection.clone().as_uri(), repr(connection.clone()), str(found.target.params),
    ]  # fmt: skip
    return "\n".join(map(str, seen))


FORMS = [
    "pgnotify://u:{}@h/db",
    "pgnotify://u:{}@h1:5433,h2:5434/db?target_session_attrs=read-write",
    "pgnotify://u:{}@[::1]:5433/db",
    "pgnotify://:{}@/db?host=/run/postgresql",
    "pgnotify:///db?user=u&password={}&sslmode=require",
    "pgnotify://u:{}@%2Frun%2Fpostgresql/db",
    "pgnotify+postgresql://u:{}@h/db",
    "pgnotify+postgresql+psycopg://u:{}@h/db?sslmode=require",
]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_that_people_see_shows_the_password(form: str) -> None:
    connection = Connection(form.format(SECRET))
    assert SECRET not in connection.as_uri(), "asked before anything else"
    assert SECRET not in shown_by(connection)
    assert SECRET not in shown_by(connection.clone())
    assert SECRET not in shown_by(pickle.loads(pickle.dumps(connection)))
    assert SECRET not in shown_by(copy.copy(connection))


@pytest.mark.parametrize("form", FORMS)
def test_every_copy_still_knows_the_password(form: str) -> None:
    connection = Connection(form.format(SECRET))
    expected = read(connection).target
    assert expected.password == SECRET
    for other in (
        connection.clone(),
        pickle.loads(pickle.dumps(connection)),
        connection.clone().clone(),
    ):
        assert read(other).target == expected
    again = Connection(connection.as_uri(include_password=True))
    assert read(again).target == expected


def test_the_mask_can_be_chosen() -> None:
    connection = Connection(f"pgnotify://u:{SECRET}@h/db")
    assert connection.as_uri(mask="XX") == "pgnotify://u:XX@h/db"
    assert connection.as_uri(mask="") == "pgnotify://u:@h/db"


def test_a_url_without_a_password_shows_no_mask() -> None:
    assert Connection("pgnotify://u@h/db").as_uri() == "pgnotify://u@h/db"
    assert Connection("pgnotify://h/db").as_uri() == "pgnotify://h/db"


def test_as_uri_of_a_url_that_is_not_the_connections_own() -> None:
    # Celery's banner and `report` ask with URLs of the configuration.
    transport = Connection("pgnotify://").transport
    assert SECRET not in transport.as_uri(f"pgnotify://u:{SECRET}@h1:1,h2:2/db")


def test_a_wrong_url_shows_no_password_in_its_traceback() -> None:
    with pytest.raises(ConfigurationError) as error:
        target_of(f"pgnotify://u:{SECRET}@h:port/db?sslmod=1")
    assert SECRET not in "".join(traceback.format_exception(error.value))


def test_options_hash_and_compare_with_the_password_and_do_not_show_it() -> None:
    def make(password: str) -> Options:
        return options.build(urls.parse(f"pgnotify://u:{password}@h/db", NAMES), {})

    assert make(SECRET) == make(SECRET)
    assert hash(make(SECRET)) == hash(make(SECRET))
    assert make(SECRET) != make(SECRET + "x")
    assert SECRET not in repr(make(SECRET)) + str(make(SECRET))


passwords = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=8, max_size=30
)
hosts = st.one_of(
    st.from_regex(r"\A[a-z][a-z0-9.-]{0,10}(:[1-9][0-9]{0,3})?\Z"),
    st.lists(
        st.from_regex(r"\A[a-z][a-z0-9-]{0,8}(:[1-9][0-9]{0,3})?\Z"), min_size=2, max_size=3
    ).map(",".join),
    st.sampled_from(["", "[::1]", "[fe80::1]:5433", "%2Frun%2Fpostgresql"]),
)


@settings(deadline=None)
@given(password=passwords, host=hosts, path=st.sampled_from(["", "/", "/db", "/d%20b"]))
@example(password="********", host="h", path="/db")
def test_as_uri_never_raises_and_never_shows_the_password(
    password: str, host: str, path: str
) -> None:
    assume("*" not in password)
    connection = Connection(f"pgnotify://u:{quote(password, safe='')}@{host}{path}")
    shown = connection.as_uri() + repr(connection) + str(connection.clone())
    assert password not in shown
    assert quote(password, safe="") not in shown
    whole = connection.as_uri(include_password=True)
    assert read(Connection(whole)).target == read(connection).target
    assert read(connection).target.password == password


@settings(deadline=None)
@given(password=st.text(st.characters(exclude_categories=["Cs"]), min_size=8), host=hosts)
def test_as_uri_never_raises_on_a_password_that_is_not_encoded(password: str, host: str) -> None:
    # Without the marks that end the password in every reading of a URL.
    assume(not set("?;@/*") & set(password))
    transport = Connection("pgnotify://").transport
    shown = transport.as_uri(f"pgnotify://u:{password}@{host}/db")
    # It may be a part of the rest, as "pgnotify" is.
    assert shown.count(password) == f"pgnotify://u:@{host}/db".count(password)


@settings(deadline=None)
@given(url=st.text(max_size=60))
def test_any_text_is_a_url_or_a_configuration_error(url: str) -> None:
    try:
        urls.parse("pgnotify://" + url, NAMES)
    except ConfigurationError:
        pass
    shown, user, password = urls.without_password("pgnotify://" + url)
    assert isinstance(urls.with_credentials(shown, user, password), str)


# -- error messages name the place


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("pgnotify://u:p@h:5433/db", "h:5433, database 'db', user 'u'"),
        ("pgnotify://h1:1,h2:2/db", "h1:1,h2:2, database 'db'"),
        ("pgnotify://h1,h2:2/db", "h1,h2:2, database 'db'"),
        ("pgnotify:///db?host=h1,h2&port=5", "h1:5,h2:5, database 'db'"),
        ("pgnotify:///db", "local socket, database 'db'"),
        ("pgnotify:///db?host=/run/pg", "/run/pg, database 'db'"),
        ("pgnotify:///?service=prod", "service 'prod'"),
    ],
)
def test_the_place_is_described_as_people_write_it(url: str, words: str) -> None:
    assert target_of(url).describe() == words
