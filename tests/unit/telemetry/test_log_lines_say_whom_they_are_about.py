"""Log lines carry the session and task they are about, in either format, and never a secret."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import TracebackType

import pytest

from polar.config.settings import load_settings
from polar.errors import InvalidInput
from polar.gateway.session import new_key
from polar.telemetry import logs
from polar.telemetry.logs import about, formatter, note

Failure = tuple[type[BaseException], BaseException, TracebackType | None]


def line(format: str, message: str, *args: object, exc_info: Failure | None = None) -> str:
    record = logging.LogRecord("polar.test", logging.INFO, "", 0, message, args, exc_info)
    return formatter(format).format(record)


def test_json_is_one_object_a_line_with_the_ids() -> None:
    try:
        raise ValueError("bad\nthing")
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    with about(session="hi.0", task="hi"):
        written = line("json", "took %d s\nin all", 3, exc_info=failure)
    assert "\n" not in written
    found = json.loads(written)
    assert (found["session"], found["task"]) == ("hi.0", "hi")
    assert (found["level"], found["logger"], found["message"]) == ("info", "polar.test", "took 3 s\nin all")
    assert "ValueError: bad" in found["exception"]
    assert found["time"].endswith("Z")


def test_json_holds_the_fields_that_a_line_brings() -> None:
    record = logging.LogRecord("polar.audit", logging.INFO, "", 0, "done", (), None)
    record.fields = {"actor": "alice", "status": 200}
    found = json.loads(formatter("json").format(record))
    assert (found["message"], found["actor"], found["status"]) == ("done", "alice", 200)


def test_console_names_a_session_once() -> None:
    with about(session="hi.0", task="hi"):
        assert line("console", "slow").endswith("polar.test: slow (session hi.0, task hi)")
        assert line("console", "session hi.0 is slow").endswith("session hi.0 is slow")
    assert line("console", "slow").endswith("polar.test: slow")


async def test_ids_follow_into_tasks_and_stay_out_of_others() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return line("json", "at work")

    async def serve(session: str) -> str:
        note(session=session)
        await asyncio.sleep(0)
        return line("json", "served")

    with about(session="a.0", task="a"):
        inside = asyncio.create_task(work())
    outside = asyncio.create_task(work())
    one, two = await asyncio.gather(serve("b.0"), serve("c.0"))
    assert json.loads(await inside)["session"] == "a.0"
    assert "session" not in json.loads(await outside)
    assert (json.loads(one)["session"], json.loads(two)["session"]) == ("b.0", "c.0")
    assert "session" not in json.loads(line("json", "after"))


@pytest.mark.parametrize("format", ["console", "json"])
def test_no_secret_is_written(format: str) -> None:
    key = new_key()
    secrets = (key, "0123456789abcdef-token", "hunter2")
    message = f"GET /k/{key}/v1 Authorization: Bearer {secrets[1]} to postgresql://me:{secrets[2]}@db/x"
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        written = line(format, "failed: %s", message, exc_info=(type(error), error, error.__traceback__))
    assert not any(secret in written for secret in secrets)
    assert "[secret]" in written
    assert "@db/x" in written


def test_the_format_comes_from_the_command_line_the_environment_the_file_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLAR_LOG_FORMAT", raising=False)
    monkeypatch.delenv("POLAR_CONFIG", raising=False)
    assert load_settings().log_format == "console"
    monkeypatch.setenv("POLAR_LOG_FORMAT", "json")
    assert load_settings().log_format == "json"
    (tmp_path / "polar.yaml").write_text("log_format: console\n")
    assert load_settings().log_format == "json"
    assert load_settings(overrides={"log_format": "console"}).log_format == "console"
    monkeypatch.delenv("POLAR_LOG_FORMAT")
    assert load_settings().log_format == "console"
    with pytest.raises(InvalidInput, match="log_format"):
        load_settings(overrides={"log_format": "xml"})


def test_lines_go_to_a_file_in_the_chosen_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    own = logging.getLogger("polar")
    monkeypatch.setattr(own, "level", own.level)
    level = root.level
    try:
        logs.log_to_file(tmp_path / "logs" / "polar.log", "info", "json")
        logging.getLogger("polar.test").info("hello")
        logging.getLogger("library").info("not shown")
    finally:
        for handler in root.handlers:
            handler.close()
        root.setLevel(level)
    (written,) = (tmp_path / "logs" / "polar.log").read_text().splitlines()
    assert json.loads(written)["message"] == "hello"
