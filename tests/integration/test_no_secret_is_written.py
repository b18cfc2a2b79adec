"""A whole run, then a look into everything it wrote: no secret that it used is in any of it.

The agent is a careless one: it prints its environment, and leaves it in a file that is kept.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard

from polar.app.stack import running
from polar.client import AsyncClient
from polar.config.settings import Settings
from polar.models.access import TokenRole
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.fakes.webhook_receiver import receiving
from tests.systems import ASK, RUNTIMES, shell_task

pytestmark = pytest.mark.timeout(120)

OWNER = "the-owners-token-of-this-run"
ENGINE = "sk-the-engines-key-of-this-run"
SIGNING = "the-webhooks-secret-of-this-run"
ZSTD = b"\x28\xb5\x2f\xfd"


def unpacked(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The bytes themselves and what is compressed in them."""
    yield name, data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from unpacked(f"{name}:{member}", archive.read(member))
    at = data.find(ZSTD)
    while at >= 0:
        with contextlib.suppress(zstandard.ZstdError):
            yield f"{name}@{at}", zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
        at = data.find(ZSTD, at + 1)


def written(*directories: Path) -> Iterator[tuple[str, bytes]]:
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield from unpacked(str(path), path.read_bytes())


def places_of(secret: str, found: list[tuple[str, bytes]]) -> list[str]:
    return [name for name, data in found if secret.encode() in data]


async def test_no_secret_of_a_run_is_in_anything_it_wrote(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("POLAR_ENGINE_KEY", ENGINE)
    outside = tmp_path / "outside"
    outside.mkdir()
    answers: list[tuple[str, bytes]] = []
    careless = (
        f'printf %s "$POLAR_KEY" > {outside}/$$.key\nenv; env >&2; env > kept.txt; env > answer.txt\n{ASK}'
    )
    async with vllm_wire(Said("Hello.")) as engine, receiving(SIGNING) as receiver:
        place = receiver.url.removeprefix("http://").removesuffix("/hook")
        settings = Settings.model_validate(
            {
                "data_dir": tmp_path / "data",
                "server": {
                    "port": 0,
                    "token": OWNER,
                    "webhooks": {"allow": [place], "secret": SIGNING, "retry_seconds": 0.01},
                },
                "engine": {"url": engine.url, "mode": "chat"},
                "node": {"runtimes": RUNTIMES},
                "log_level": "debug",
            }
        )
        async with running(settings, lambda _step: None) as stack, AsyncClient(stack.url, OWNER) as client:
            made = [await client.create_token(role.value, role) for role in TokenRole]
            task = shell_task(
                "t",
                careless,
                samples=2,
                artifacts=["kept.txt"],
                webhook={"url": receiver.url},
                evaluator={"name": "command", "options": {"command": "cat answer.txt; test -s answer.txt"}},
            )
            await client.submit(task)
            results = await client.wait(["t"], timeout=60)
            await receiver.until_handled(2)
            answers += await _asked(stack.url, [OWNER, *(token.token for token in made)])
            recordings = [await client.recording(result.session_id) for result in results]
            archives = [await client.artifacts(result.session_id) for result in results]
    keys = [path.read_text() for path in outside.glob("*.key")]
    assert len(keys) == 2
    assert all(len(key) > 20 for key in keys)
    assert [result.reward for result in results] == [1.0, 1.0]
    found = [
        *written(tmp_path / "data"),
        *answers,
        *(piece for data in (*recordings, *archives) for piece in unpacked("answer", data)),
        *(("webhook", f"{headers}\n".encode() + body) for headers, body in receiver.requests),
        ("log", caplog.text.encode()),
        ("output", "".join(capfd.readouterr()).encode()),
    ]
    assert any(b"OPENAI_API_KEY" in data for name, data in found if "kept.txt" in name), (
        "what the agent kept was looked into"
    )
    secrets = {
        "owner": OWNER,
        "engine": ENGINE,
        "webhooks": SIGNING,
        **{f"token {token.view.name}": token.token for token in made},
        **{f"session {number}": key for number, key in enumerate(keys)},
    }
    assert {name: places for name, secret in secrets.items() if (places := places_of(secret, found))} == {}


async def _asked(url: str, tokens: list[str]) -> list[tuple[str, bytes]]:
    """What the server answers to all sorts of requests, good and bad."""
    answers = []
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", trust_env=False) as http:
        for token in tokens:
            mine = {"Authorization": f"Bearer {token}"}
            paths = (
                *("health", "openapi.json", "tasks", "sessions", "results", "events", "policy", "webhooks"),
                *("tokens", "sessions/t.0", "sessions/t.0/events", "tasks/none", "nothing"),
            )
            answers += [(path, (await http.get(f"/{path}", headers=mine)).content) for path in paths]
            for path, body in (
                ("tasks", {"id": "x"}),
                ("tasks", {"id": "t", "instruction": "other"}),
                ("sessions/t.0/release", {"key": {"fencing_token": 0, "secret": ""}}),
                ("policy/pause", {}),
            ):
                answer = await http.post(f"/{path}", headers=mine, content=json.dumps(body))
                answers.append((path, answer.content))
    return answers
