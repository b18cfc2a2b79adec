"""A dataset on the hub is its own files, in one commit; what goes wrong is explained and loses nothing.

The client is huggingface_hub's own, in both of its ways: Xet, and large files over plain HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from polar.app.datagen import FILES, HubDataset
from polar.errors import Conflict, Forbidden, InvalidInput, PolarError, Unavailable
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.sft import CARD, Table, TaskSessions, card, write_dataset
from polar.trajectory.learnable import EndedSession
from tests.fakes.hub import READ_ONLY, TOKEN, Hub, HubRepository, hugging_face_hub
from tests.fakes.recordings import recording

NAME = "me/data"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A dataset, beside what a generation leaves with it and what somebody put there."""
    out = tmp_path / "out"
    write(out, "s1", 1.0)
    (out / ".polar" / "recordings").mkdir(parents=True)
    for name in (
        ".lock",
        ".polar/polar.db",
        ".polar/token",
        ".polar/recordings/s1",
        "notes.md",
        "old.parquet",
    ):
        (out / name).write_text("not the dataset's")
    return out


def write(out: Path, session: str, reward: float) -> None:
    one = recording(session, reward=reward)
    group = TaskSessions("t", "pi", {"licence": "MIT"}, [EndedSession(one.result, one)])
    written = write_dataset([group], out, parse_acceptance("reward >= 1"))
    (out / CARD).write_text(card("out", written, [("push-to-hub", NAME)]))


@pytest.fixture(params=["xet", "lfs"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str) -> AsyncIterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", transport == "lfs")
    async with hugging_face_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


async def push(directory: Path, *, private: bool = False, name: str = NAME) -> list[str]:
    """What was said."""
    said: list[str] = []
    dataset = HubDataset.check(name, private=private)
    await asyncio.wait_for(asyncio.to_thread(dataset.push, directory, said.append), 60)
    return said


async def test_the_datasets_files_go_there_and_no_others(hub: Hub, directory: Path) -> None:
    said = await push(directory)
    assert said == [f"pushing {', '.join(FILES)} (0.0 MB)", f"pushed to {hub.url}/datasets/{NAME}"]
    stored = hub.repositories[NAME]
    assert stored.commits[1:] == [list(FILES)], "one commit"
    assert stored.files == {CARD: (directory / CARD).read_bytes()}
    digests = {
        table.file: hashlib.sha256((directory / table.file).read_bytes()).hexdigest() for table in Table
    }
    assert stored.large == digests
    assert not stored.private


@pytest.mark.parametrize("transport", ["lfs"])
async def test_their_bytes_are_there(hub: Hub, directory: Path) -> None:
    await push(directory)
    assert set(hub.large.values()) == {(directory / table.file).read_bytes() for table in Table}


async def test_pushing_again_changes_nothing(hub: Hub, directory: Path) -> None:
    await push(directory)
    hub.requests.clear()
    assert await push(directory) == [f"{hub.url}/datasets/{NAME} is up to date"]
    assert len(hub.repositories[NAME].commits) == 2
    assert not [asked for asked in hub.requests if "/uploads/" in asked or "/xet/" in asked]


async def test_only_what_changed_is_pushed(hub: Hub, directory: Path) -> None:
    await push(directory)
    before = (directory / Table.PREFERENCE.file).read_bytes()
    write(directory, "s2", 0.0)
    assert (directory / Table.PREFERENCE.file).read_bytes() == before, "no pair before, none now"
    await push(directory)
    changed = [CARD, Table.SFT.file, Table.TOKENS.file, Table.REJECTED.file]
    assert hub.repositories[NAME].commits[2:] == [changed]


async def test_a_repository_is_made_private(hub: Hub, directory: Path) -> None:
    await push(directory, private=True)
    assert hub.repositories[NAME].private
    await push(directory, private=True)


async def test_nothing_private_goes_to_a_public_repository(hub: Hub, directory: Path) -> None:
    hub.repositories[NAME] = HubRepository(private=False)
    with pytest.raises(Conflict, match=r"is public; the dataset is in .*; run the same command to push it"):
        await push(directory, private=True)
    assert len(hub.repositories[NAME].commits) == 1


def digests(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}


@pytest.mark.parametrize(
    ("token", "name", "error", "problem"),
    [
        ("hf_wrong", NAME, Forbidden, "the hub rejected the token; the dataset is in .*HF_TOKEN"),
        (READ_ONLY, NAME, Forbidden, f"the token may not write to {NAME} on the hub; the dataset is in"),
        (
            TOKEN,
            "you/data",
            Forbidden,
            "the token may not write to you/data on the hub.*choose a repository of",
        ),
    ],
)
async def test_a_token_that_does_not_do_is_explained(
    hub: Hub,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    name: str,
    error: type[PolarError],
    problem: str,
) -> None:
    hub.repositories[NAME] = HubRepository(private=False)
    hub.repositories["you/data"] = HubRepository(private=False)
    monkeypatch.setenv("HF_TOKEN", token)
    before = digests(directory)
    with pytest.raises(error, match=problem) as raised:
        await push(directory, name=name)
    assert token not in str(raised.value)
    assert digests(directory) == before
    assert all(len(one.commits) == 1 for one in hub.repositories.values())


async def test_a_hub_that_cannot_be_reached_is_explained(
    hub: Hub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"cannot write to the hub .*; the dataset is in .*; run the same"):
        await push(directory)
    assert not hub.repositories


def test_without_a_token_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(InvalidInput, match=r"no Hugging Face token found .*hf auth login"):
        HubDataset.check(NAME, private=False)


@pytest.mark.parametrize(
    "name", ["data", "a/b/c", "me/", "/data", "me/da ta", "https://huggingface.co/me/data"]
)
def test_a_name_that_is_none_is_refused_first(name: str) -> None:
    with pytest.raises(InvalidInput, match="--push-to-hub"):
        HubDataset.check(name, private=False)
