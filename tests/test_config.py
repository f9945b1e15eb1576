"""Settings: what is accepted, what is refused, and that no password is ever shown."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
from kombu import Connection
from sqlalchemy import make_url

from tenure.config import VARIABLES, Settings, mask_url
from tenure.ledger.errors import ConfigurationError


def read(**variables: str) -> Settings:
    return Settings.from_environ({"TENURE_STATE_DIR": "/state"} | {f"TENURE_{k}": v for k, v in variables.items()})


def refusal(**variables: str) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        read(**variables)
    return caught.value


def test_defaults():
    settings = read()
    assert dataclasses.asdict(settings) == {
        "state_dir": Path("/state"),
        "ledger_url": "sqlite:////state/ledger.sqlite3",
        "broker_url": None,
        "keys": Path("/state/keys.json"),
        "principal": "default",
        "max_concurrent_children": 3,
        "max_spawn_depth": 1,
        "owner_queue": "owner",
        "work_queue": "work",
        "lease_seconds": 10.0,
        "recovery_seconds": 30.0,
        "unknown_grace_seconds": 86400.0,
        "retention_days": 0,
        "outbox_bytes": 64 * 2**20,
        "resend_seconds": 2.0,
        "visibility_seconds": 60,
        "host_id": None,
        "imports": (),
        "log_level": "INFO",
        "given": frozenset({"TENURE_STATE_DIR"}),
    }


def test_the_state_folder_is_the_users(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    monkeypatch.setattr("sys.platform", "linux")
    assert Settings.from_environ({}).keys == Path("/elsewhere/tenure/keys.json")


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch):
    monkeypatch.setattr("platformdirs.user_state_path", lambda _: Path("~/.local/state/tenure"))
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environ({})
    assert "TENURE_STATE_DIR='~/.local/state/tenure': allowed is an absolute path" in caught.value.detail


@pytest.mark.parametrize("folder", ["/a b", "/50%20off", "/a?b", "/a#b", "/a+b", "/ü", "/a@b:c"])
def test_the_default_ledger_lies_in_the_state_folder_whatever_its_name(folder):
    url = Settings.from_environ({"TENURE_STATE_DIR": folder}).ledger_url
    assert make_url(url).database == f"{folder}/ledger.sqlite3"


def test_zero_stays_zero():
    settings = read(MAX_CONCURRENT_CHILDREN="0", MAX_SPAWN_DEPTH="0", UNKNOWN_GRACE_SECONDS="0", RETENTION_DAYS="0")
    assert settings.max_concurrent_children == 0
    assert settings.max_spawn_depth == 0
    assert settings.unknown_grace_seconds == 0
    assert settings.retention_days == 0


NOT_A_NUMBER = [
    *("", " ", "nan", "NaN", "inf", "-inf", "Infinity", "1e3", "1E3", "0x10", "0b1", "0o7", "+3", "-1", "-0"),
    *(" 3", "3 ", "3\n", "\t3", "3\r", "1_000", "1,5", "1,000", "03", "00", "true", "False", "None", "three", "3s"),
    *("3.", ".5", "1.2.3", "\u0663", "\uff13", "\u00b2", "9" * 5000, "--3", "3;4", "3 4", "1/2", "3\x00"),
]
WHOLE = {
    "MAX_CONCURRENT_CHILDREN": (0, 1000),
    "MAX_SPAWN_DEPTH": (0, 16),
    "RETENTION_DAYS": (0, 36500),
    "OUTBOX_BYTES": (65536, 2**34),
    "VISIBILITY_SECONDS": (1, 86400),
}
SECONDS = {
    "LEASE_SECONDS": (1, 3600),
    "RECOVERY_SECONDS": (1, 86400),
    "UNKNOWN_GRACE_SECONDS": (0, 31536000),
    "RESEND_SECONDS": (0.05, 60),
}


@pytest.mark.parametrize("name", WHOLE | SECONDS)
@pytest.mark.parametrize("text", NOT_A_NUMBER)
def test_what_is_not_a_plain_number_is_refused(name, text):
    error = refusal(**{name: text})
    assert error.data == {"variables": [f"TENURE_{name}"]}
    shown = text if len(text) < 100 else "9" * 120 + "..."
    assert error.detail.startswith(f"TENURE_{name}={shown!r}: allowed is ")
    low, high = (WHOLE | SECONDS)[name]
    assert error.detail.endswith(f"from {low} to {high}")


@pytest.mark.parametrize(("name", "bounds"), WHOLE.items())
def test_whole_numbers_are_taken_within_their_bounds(name, bounds):
    for value in bounds:
        read_value = getattr(read(**{name: str(value)}), name.lower())
        assert (read_value, type(read_value)) == (value, int)
    for value in (bounds[0] - 1, bounds[1] + 1, bounds[0] + 0.5):
        assert f"TENURE_{name}='{value}'" in refusal(**{name: str(value)}).detail


@pytest.mark.parametrize(("name", "bounds"), SECONDS.items())
def test_seconds_are_taken_within_their_bounds(name, bounds):
    low, high = bounds
    for value in (low, low + 0.25, high):
        assert getattr(read(**{name: str(value)}), name.lower()) == value
    for text in (f"{low - 0.01:.2f}", f"{high}.001"):
        assert f"TENURE_{name}={text!r}" in refusal(**{name: text}).detail


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("PRINCIPAL", ["a", "team-1.eu_x", "x" * 64], ["", "A", "x" * 65, "a b", "a/b", "ä", "a\n"]),
        ("HOST_ID", ["a", "Rack-1.eu_X", "x" * 64], ["", "x" * 65, "a b", "a/b", "a\n"]),
        ("OWNER_QUEUE", ["celery", "o.1"], ["", "a,b", "a b", "amq.x", "x" * 65, "a\n"]),
        ("WORK_QUEUE", ["celery", "w.1"], ["", "a,b", "owner"]),
        ("STATE_DIR", ["/", "/var/lib/tenure"], ["", "state", "./state", "~/state", " /state", "//state"]),
        ("KEYS", ["/etc/tenure/keys"], ["", "keys.json", "~/keys.json"]),
        ("LOG_LEVEL", ["DEBUG", "info", "Warning", "ERROR", "CRITICAL"], ["", "TRACE", "10", "NOTSET", "INFO "]),
        ("IMPORTS", ["", "a", "a.b, c_1.d"], [" ", ",", "a,", "a,,b", "a-b", "a.py/b", ".a", "a.", "1a", "a.class"]),
        (
            "LEDGER_URL",
            [
                "sqlite:////var/lib/ledger.sqlite3",
                "postgresql+psycopg://u:p%40w@h:5432/db?sslmode=require",
                "postgresql+psycopg:///db?host=/run/postgresql",
                "postgresql+psycopg://[::1]/db",
                "postgresql+psycopg://h1,h2/db",
            ],
            [
                *("", " ", "ledger.sqlite3", "/ledger.sqlite3", "sqlite://", "sqlite:///", "sqlite:///:memory:"),
                *("sqlite:///ledger.sqlite3", "sqlite:////", "sqlite:////a/", "sqlite:////a?mode=ro", "sqlite://h//a"),
                *(
                    "postgresql://",
                    "postgresql://h",
                    "postgresql://h/",
                    "postgresql://h:port/db",
                    "postgresql://h:99999/d",
                ),
                *("postgresql+psycopg2://h/d", "postgresql+asyncpg://h/d", "postgres://h/d", "mysql://h/d"),
                *(
                    "postgresql://u:p#w@h/d",
                    "postgresql://h/d\n",
                    "postgresql://h/d postgresql://i/d",
                    "Postgresql://h/d",
                ),
            ],
        ),
        (
            "BROKER_URL",
            [
                *("redis://h", "redis://h:6379/", "redis://:pw@h:6379/15", "rediss://u:pw@h/0?ssl_cert_reqs=required"),
                *("redis+socket:///run/redis.sock", "redis+socket:///run/redis.sock?virtual_host=2"),
                *("amqp://h", "amqp://u:p@h:5672//", "amqps://u:p@h/vhost", "redis://[::1]:1/0"),
            ],
            [
                *("", "memory://", "memory:///", "valkey://h/0", "h:6379", "redis://", "redis://:pw@/0", "redis://h/x"),
                *(
                    "redis:///0",
                    "redis+socket://",
                    "redis+socket:///",
                    "redis+socket://h/s",
                    "redis+socket:///" + "x" * 103,
                ),
                *(
                    "amqp://",
                    "amqp:///v",
                    "amqp://a//;amqp://b//",
                    "sentinel://h/0",
                    "sqs://",
                    "filesystem://",
                    "pyamqp://h",
                ),
                *("REDIS://h", " redis://h", "redis://h\n", "redis://h:0x1", "redis://:p#w@h/0", "redis:/h/0"),
            ],
        ),
    ],
)
def test_texts(name, good, bad):
    for text in good:
        read(**{name: text})
    for text in bad:
        assert refusal(**{name: text}).data == {"variables": [f"TENURE_{name}"]}, text


def test_what_is_read_is_in_one_form():
    assert read(IMPORTS="a.b, c").imports == ("a.b", "c")
    assert read(LOG_LEVEL="warning").log_level == "WARNING"
    assert read(LEDGER_URL="postgresql://u:p%40w@h/db").ledger_url == "postgresql+psycopg://u:p%40w@h/db"


@pytest.mark.parametrize(
    "url",
    ["redis://h", "rediss://h", "redis+socket:///s", "amqp://h", "amqps://h"],
    ids=lambda url: url.partition(":")[0],
)
def test_every_broker_allowed_is_one_that_kombu_knows(url):
    assert Connection(read(BROKER_URL=url).broker_url).transport_cls


def test_a_broker_refused_for_a_reason_is_refused_with_it():
    with pytest.raises(KeyError):  # the day kombu knows it, it can be allowed
        Connection("valkey://h").transport  # noqa: B018 - the property looks the transport up
    assert "address a Valkey server as redis://" in refusal(BROKER_URL="valkey://h/0").detail
    assert "no other process would see its messages" in refusal(BROKER_URL="memory://").detail


def test_queues_must_differ():
    assert refusal(OWNER_QUEUE="q", WORK_QUEUE="q").detail == (
        "TENURE_WORK_QUEUE='q': it must differ from TENURE_OWNER_QUEUE"
    )
    assert refusal(OWNER_QUEUE="work").data == {"variables": ["TENURE_WORK_QUEUE"]}


def test_everything_that_is_wrong_is_told_at_once():
    error = refusal(LEASE_SECONDS="0", KEYS="keys", OWNER_QUEUE="work", SPWAN_DEPTH="1", BROKER_URL="memory://")
    assert sorted(error.data["variables"]) == [
        *("TENURE_BROKER_URL", "TENURE_KEYS", "TENURE_LEASE_SECONDS", "TENURE_SPWAN_DEPTH", "TENURE_WORK_QUEUE"),
    ]
    assert error.detail.count("; ") == 4
    assert "TENURE_LEASE_SECONDS='0': allowed is seconds from 1 to 3600" in error.detail


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("TENURE_LEASE_SECOND", "TENURE_LEASE_SECONDS"),
        ("TENURE_BROKER", "TENURE_BROKER_URL"),
        ("TENURE_MAX_CHILDREN", "TENURE_MAX_CONCURRENT_CHILDREN"),
        ("TENURE_KEY", "TENURE_KEYS"),
        ("TENURE_lease_seconds", "TENURE_LEASE_SECONDS"),
        ("TENURE_ZZZ", None),
        ("TENURE_", None),
    ],
)
def test_an_unknown_variable_is_refused_by_name_and_without_its_value(name, near):
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environ({name: "hunter2"})
    hint = f" (did you mean {near}?)" if near else ""
    assert caught.value.detail == f"{name}: there is no such setting{hint}"


@pytest.mark.parametrize(
    "name",
    [
        *("TENURE_TEST_REDIS", "TENURE_SERVICE_HOST", "TENURE_SERVICE_PORT", "TENURE_SERVICE_PORT_HTTP", "TENURE_PORT"),
        *(
            "TENURE_PORT_80_TCP",
            "TENURE_PORT_80_TCP_ADDR",
            "TENURE_OWNER_SERVICE_HOST",
            "TENURE_OWNER_PORT_80_TCP_PROTO",
        ),
        *("PATH", "XTENURE_X", "tenure_x"),
    ],
)
def test_variables_that_are_not_ours_are_left_alone(name):
    Settings.from_environ({name: "tcp://10.0.0.1:80"})


PASSWORD = "s3cr3t"
LEAKY = [
    *(f"redis://:{PASSWORD}@h:1/0", f"redis://u:{PASSWORD}@h", f"amqp://u:{PASSWORD}@h//", f"redis://{PASSWORD}@h"),
    *(f"redis://:{PASSWORD}", f"redis://:{PASSWORD}/0", f"redis://h:{PASSWORD}/0", f"redis://[::1]:{PASSWORD}/0"),
    *(
        f"redis://u:a@{PASSWORD}@h/0",
        f"redis://u:a/{PASSWORD}@h/0",
        f"redis://u:a?{PASSWORD}@h/0",
        f"x://u:a#{PASSWORD}@h",
    ),
    *(f"redis:/:{PASSWORD}@h", f"u:{PASSWORD}@h/db", f":{PASSWORD}@h", f"redis://:a@h1;redis://:{PASSWORD}@h2"),
    *(
        f"postgresql://h/d?password={PASSWORD}",
        f"postgresql://h/d?a=1&sslPassword={PASSWORD}&b=2",
        f"x://h?token={PASSWORD}",
    ),
    *(
        f"redis://u:a:{PASSWORD}@h",
        f"redis://u:{PASSWORD}\n@h",
        f" redis://u:{PASSWORD}@h",
        f"redis://u:{PASSWORD}@[h",
        f"redis://u:{PASSWORD}@h\u2100",
    ),
]


@pytest.mark.parametrize("url", LEAKY)
def test_no_password_is_ever_shown(url):
    assert PASSWORD not in mask_url(url)
    for name in ("LEDGER_URL", "BROKER_URL"):
        try:
            settings = read(**{name: url})
        except ConfigurationError as error:
            shown = [repr(error), error.explain(), repr(error.__cause__)]
        else:
            shown = [repr(settings), str(settings), repr(settings.describe())]
        assert PASSWORD not in "".join(shown)
    if "://" in url:
        assert PASSWORD not in refusal(PRINCIPAL=url).detail


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("amqp://guest:guest@127.0.0.1:5672//", "amqp://guest:***@127.0.0.1:5672//"),
        ("redis://:pw@[::1]:6379/0", "redis://:***@[::1]:6379/0"),
        ("postgresql://u:p@h1,h2/db?sslmode=require", "postgresql://u:***@h1,h2/db?sslmode=require"),
        ("sqlite:////var/a.sqlite3", "sqlite:////var/a.sqlite3"),
        ("localhost:6379", "localhost:6379"),
        ("", ""),
    ],
)
def test_what_is_no_password_is_shown(url, shown):
    assert mask_url(url) == shown


def test_a_description_has_every_setting_and_where_it_came_from():
    described = read(BROKER_URL=f"redis://:{PASSWORD}@h/1", IMPORTS="a,b").describe()
    assert [one.name for one in described] == [variable.name for variable in VARIABLES]
    told = {one.name: (one.value, one.source) for one in described}
    assert told["TENURE_BROKER_URL"] == ("redis://:***@h/1", "environment")
    assert told["TENURE_IMPORTS"] == ("a,b", "environment")
    assert told["TENURE_HOST_ID"] == ("", "default")
    assert told["TENURE_LEASE_SECONDS"] == ("10.0", "default")
    assert told["TENURE_LEDGER_URL"] == ("sqlite:////state/ledger.sqlite3", "default")


def test_every_field_is_a_variable_and_every_variable_says_what_it_is():
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert [*(variable.field for variable in VARIABLES), "given"] == fields
    assert all(variable.meaning and variable.kind.allowed for variable in VARIABLES)


def test_settings_travel_and_do_not_change():
    settings = read(LEASE_SECONDS="5")
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.lease_seconds = 1
