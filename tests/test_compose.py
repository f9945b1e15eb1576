"""The fleet in docker-compose.yml: its commands, its settings, and what it publishes."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from celery import Celery
from celery.bin.base import CLIContext
from celery.bin.celery import celery as celery_command
from flower.options import default_options

from tenure.config import Settings

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
GIVEN = {"POSTGRES_PASSWORD": "pg0", "REDIS_PASSWORD": "rd0", "FLOWER_BASIC_AUTH": "user:fl0"}
VARIABLE = re.compile(r"\$\{(\w+)(:[?-])?([^}]*)\}")


def fill_in(text: str) -> str:
    return VARIABLE.sub(lambda found: GIVEN.get(found[1], ""), text)


def environment(name: str) -> dict[str, str]:
    """What a service's process finds: the image's variables and its own."""
    image = dict(re.findall(r"\b(TENURE_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
    return image | {key: fill_in(value) for key, value in SERVICES[name].get("environment", {}).items()}


def resolve(command: click.Command, args: list[str], parent: click.Context | None = None) -> None:
    """Parse the arguments as the program would, down to the last subcommand, without running anything."""
    told = CLIContext(app=Celery(set_as_current=False), no_color=True, workdir=None)  # what Celery's options look at
    context = click.Context(command, parent=parent, info_name=command.name, obj=told)
    given, rest, _ = command.make_parser(context).parse_args(list(args))
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name in given:
            parameter.type_cast_value(context, given[parameter.name])
    if isinstance(command, click.Group):
        _, sub, rest = command.resolve_command(context, rest)
        assert sub is not None, args
        resolve(sub, rest, context)


def flower_options(args: list[str]) -> list[str]:
    return [arg.lstrip("-").partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]


@pytest.mark.parametrize("name", OURS)
def test_each_command_is_one_that_its_program_knows(name):
    program, *args = SERVICES[name]["command"]
    if program == "tenure":
        resolve(importlib.import_module("tenure.cli").main, args)
    elif "flower" in args:
        options = args[args.index("flower") + 1 :]
        assert set(flower_options(options)) <= set(default_options.as_dict())
        resolve(celery_command, args[: args.index("flower") + 1])
    else:
        assert program == "celery"
        resolve(celery_command, args)


@pytest.mark.parametrize(
    "args", ["worker -Q", "worker --queue-name owner", "worker -P fibres", "beat --pid=", "workers"]
)
def test_a_wrong_command_would_be_noticed(args):
    with pytest.raises(click.ClickException):
        resolve(celery_command, ["-A", "tenure.tasks", *args.split()])


@pytest.mark.parametrize("name", OURS)
def test_each_service_starts_with_settings_that_are_accepted(name):
    settings = Settings.from_environ({k: v for k, v in environment(name).items() if k.startswith("TENURE_")})
    assert settings.state_dir == Path("/var/lib/tenure")


def test_the_owner_and_the_worker_consume_the_queues_that_are_configured():
    settings = Settings.from_environ({})
    for name, queue in (("owner", settings.owner_queue), ("worker", settings.work_queue)):
        command = SERVICES[name]["command"]
        assert command[command.index("-Q") + 1] == queue


def test_who_knows_the_database_and_who_the_broker():
    def holding(variable: str) -> set[str]:
        return {name for name in OURS if variable in SERVICES[name].get("environment", {})}

    assert holding("TENURE_LEDGER_URL") == {"migrate", "owner"}
    assert holding("TENURE_BROKER_URL") == {"owner", "beat", "worker", "flower"}
    assert {name for name in OURS if "keys:/keys:ro" in SERVICES[name].get("volumes", [])} == {"owner", "worker"}


def test_the_owner_applies_one_message_at_a_time_and_has_time_to_end():
    command = SERVICES["owner"]["command"]
    assert (command[command.index("-P") + 1], command[command.index("-c") + 1]) == ("threads", "1")
    assert SERVICES["owner"]["restart"] == "always"
    assert SERVICES["owner"]["stop_grace_period"] == "30s"


def test_what_is_published_is_published_to_this_machine_only():
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"flower": ["127.0.0.1:5555:5555"]}
    assert not any("network_mode" in service for service in SERVICES.values())


def test_every_secret_must_be_given_and_none_stands_in_the_file():
    demanded = {name for name, operator, _ in VARIABLE.findall(TEXT) if operator == ":?"}
    assert demanded == set(GIVEN)
    assert {name for name, operator, _ in VARIABLE.findall(TEXT) if operator != ":?"} == {"TENURE_IMPORTS"}
    for line in TEXT.splitlines():
        if re.match(r"\s+\w*(PASSWORD|AUTH|SECRET)\w*:", line):
            assert "${" in line


def test_a_broker_neither_forgets_nor_evicts():
    command = SERVICES["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"


def test_the_image_does_not_run_as_root():
    users = re.findall(r"^USER (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert users == ["tenure"]


def compose() -> list[str]:
    """The Compose of this machine, which reads files without an engine."""
    for program in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(program[0]):
            answer = subprocess.run([*program, "version"], capture_output=True, check=False)
            if answer.returncode == 0:
                return program
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


def config(given: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)  # away from an .env file of the user's
    around = {k: v for k, v in os.environ.items() if k not in GIVEN and not k.startswith("COMPOSE_")}
    args = [*compose(), "-f", str(tmp_path / "docker-compose.yml"), "config"]
    return subprocess.run(args, env=around | given, capture_output=True, text=True, check=False, cwd=tmp_path)


def test_compose_accepts_the_file(tmp_path):
    done = config(GIVEN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


@pytest.mark.parametrize("missing", GIVEN)
def test_compose_refuses_to_start_without_a_secret(missing, tmp_path):
    done = config({name: value for name, value in GIVEN.items() if name != missing}, tmp_path)
    assert done.returncode != 0
    assert "must be set" in done.stderr
