"""Branches and replays through the whole chain: server, node, gateway and an agent in its sandbox."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polar.app.verification import verify
from polar.client import AsyncClient
from polar.engines.base import GenerateRequest
from polar.errors import Unavailable
from polar.models.completion import REPLAYED
from polar.models.session import AgentEnd, FailureReason, LeaseKey, SessionResult, SessionStatus
from polar.models.task import TaskStatus
from polar.recordings.recording import Recording, decode
from polar.trajectory.accounting import Exclusion
from polar.trajectory.materialise import materialise
from tests.fakes.scripted_engine import Answer, Script
from tests.systems import TALK, System, install_shell, shell_task, system

SCRIPT = ["First.", "Second.", "Third.", "Fourth.", "Fifth."]


NAMES = f"""{sys.executable} - <<'PY'
import json, os, tempfile, urllib.request
name = os.path.basename(tempfile.mkdtemp(dir="."))
messages = [{{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}}]
for told in (f"made {{name}}", "Go on.", None):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({{"model": os.environ["POLAR_MODEL"], "messages": messages}}).encode(),
        {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {{"role": "user", "content": told}}]
open("answer.txt", "w").write(name if name in said["content"] else "")
PY
"""
"""A shell agent with a directory of its own, whose name it tells after its first turn."""


def repeating(running: System) -> Script:
    """A policy that says the name that it was shown."""

    def answer(request: GenerateRequest) -> str:
        text = running.engine.tokenizer.decode(list(request.prompt_ids))
        return " ".join(re.findall(r"made (tmp\w+)", text)[-1:]) or "Start."

    return answer


async def recording(running: System, result: SessionResult) -> Recording:
    return decode(await running.client.recording(result.session_id))


async def test_branches_share_a_beginning_and_go_on_by_themselves(tmp_path: Path) -> None:
    async with system(tmp_path, SCRIPT) as running, running.node():
        client = running.client
        await client.submit(shell_task("talk", TALK))
        (sample,) = await client.wait(["talk"], timeout=60)
        views = await client.branch("talk.0", calls=1, samples=3)
        assert [view.id for view in views] == ["talk.1", "talk.2", "talk.3"]
        sample, *branches = sorted(await client.wait(["talk"], timeout=60), key=lambda one: one.sample)
        assert (await client.task("talk")).status is TaskStatus.FINISHED
        recordings = [await recording(running, one) for one in (sample, *branches)]
    assert len(running.engine.requests) == 5
    first, *others = recordings
    shared = first.completions[0]
    for result, branch in zip(branches, others, strict=True):
        again, new = branch.completions
        assert again.extra[REPLAYED] == "talk.0"
        assert (again.id, again.response) == (shared.id, shared.response)
        assert np.array_equal(again.logprobs, shared.logprobs)
        assert np.array_equal(new.prompt_ids, first.completions[1].prompt_ids)
        assert result.stats.excluded == {Exclusion.REPLAYED: len(shared.sampled_ids)}
        (trace,) = (materialise(branch.trajectory, ref) for ref in branch.trajectory.traces)
        assert trace.completion_ids == (new.id,)
        assert not (await verify("branch", branch, None, None, lambda _: None)).problems
        report = result.replay
        assert report is not None
        assert (report.origin, report.calls, report.divergence_count) == ("talk.0", 1, 0)
    assert {one.completions[1].response.content for one in recordings} == set(SCRIPT[1:])


async def test_a_branch_is_as_old_as_what_it_sampled_itself(tmp_path: Path) -> None:
    async with system(tmp_path, SCRIPT) as running, running.node():
        await running.client.submit(shell_task("talk", TALK))
        await running.client.wait(["talk"], timeout=60)
        running.engine.policy_version = 7
        await running.client.branch("talk.0", calls=1)
        sample, branch = await running.client.wait(["talk"], timeout=60)
    assert (sample.policy_version_min, sample.policy_version_max) == (0, 0)
    assert (branch.policy_version_min, branch.policy_version_max) == (7, 7)


async def test_a_recording_is_fetched_once_for_its_branches_however_long_the_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, asked = AsyncClient.origin, list[str]()

    async def at_the_second_time(self: AsyncClient, session_id: str, key: LeaseKey) -> bytes:
        asked.append(session_id)
        if len(asked) == 1:
            raise Unavailable("no server")
        return await fetch(self, session_id, key)

    monkeypatch.setattr(AsyncClient, "origin", at_the_second_time)
    async with system(tmp_path, SCRIPT) as running, running.node():
        await running.client.submit(shell_task("talk", TALK))
        await running.client.wait(["talk"], timeout=60)
        await running.client.branch("talk.0", calls=1, samples=3)
        results = await running.client.wait(["talk"], timeout=60)
    assert [(result.status, result.attempt) for result in results] == [(SessionStatus.COMPLETED, 1)] * 4
    assert len(asked) == 2


async def test_a_task_branches_by_itself_before_it_is_finished(tmp_path: Path) -> None:
    at = {"name": "calls", "options": {"calls": [1]}}
    task = shell_task("talk", TALK, samples=2, branching={"at": at, "samples": 2})
    async with system(tmp_path, SCRIPT) as running, running.node():
        await running.client.submit(task)
        results = await running.client.wait(["talk"], timeout=60)
        origins = [view.origin async for view in running.client.sessions("talk")]
    assert len(results) == 6
    assert {result.status for result in results} == {SessionStatus.COMPLETED}
    assert sorted(origin.session_id for origin in origins if origin) == ["talk.0"] * 2 + ["talk.1"] * 2
    assert all(result.replay is not None for result in results if result.sample >= 2)


async def test_a_replay_asks_no_engine_and_leaves_the_group_alone(tmp_path: Path) -> None:
    async with system(tmp_path, SCRIPT) as running, running.node():
        client = running.client
        await client.submit(shell_task("talk", TALK))
        (sample,) = await client.wait(["talk"], timeout=60)
        whole = await client.replay("talk.0")
        part = await client.replay("talk.0", calls=1)
        (again,) = await client.wait([whole.task_id], timeout=60)
        (begun,) = await client.wait([part.task_id], timeout=60)
        assert len(running.engine.requests) == 2
        assert len([view async for view in client.sessions("talk")]) == 1
    assert (again.reward, again.agent_end) == (sample.reward, AgentEnd.EXITED)
    assert again.replay is not None
    assert again.replay.is_faithful
    assert (begun.agent_end, begun.stats.completions) == (AgentEnd.REPLAYED, 1)


async def test_a_divergence_is_told_with_what_differs(tmp_path: Path) -> None:
    talk = TALK.replace('"And then?"', 'open("/proc/uptime").read()')
    async with system(tmp_path, SCRIPT) as running, running.node():
        client = running.client
        await client.submit(shell_task("talk", talk))
        await client.wait(["talk"], timeout=60)
        view = await client.replay("talk.0")
        (again,) = await client.wait([view.task_id], timeout=60)
        assert len(running.engine.requests) == 2
    assert again.agent_end is AgentEnd.REPLAYED
    assert again.replay is not None
    (divergence,) = again.replay.divergences
    assert divergence.call == 1
    assert "--- recorded" in divergence.difference


async def test_a_branch_is_shown_the_names_of_its_own_sandbox(tmp_path: Path) -> None:
    async with system(tmp_path, []) as running, running.node():
        running.engine.script.append(repeating(running))
        client = running.client
        await client.submit(shell_task("names", NAMES))
        await client.wait(["names"], timeout=60)
        await client.branch("names.0", calls=2)
        sample, branch = await client.wait(["names"], timeout=60)
    assert sample.reward == branch.reward == 1.0
    assert branch.replay is not None
    assert (branch.replay.calls, branch.replay.divergence_count) == (1, 1)


async def test_a_resumed_session_is_shown_the_names_of_its_own_sandbox(tmp_path: Path) -> None:
    async with system(tmp_path, []) as running:
        repeat = repeating(running)
        running.engine.script += [repeat, repeat, Answer("Never.", gate=asyncio.Event()), repeat]
        await running.client.submit(shell_task("names", NAMES))
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        async with running.node(name="second"):
            (result,) = await running.client.wait(["names"], timeout=60)
    assert result.reward == 1.0
    superseded = result.stats.excluded["superseded_by_resume"]
    assert result.stats.sampled_tokens == result.stats.trainable_tokens + superseded


async def test_a_recording_of_another_version_of_the_harness_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system(tmp_path, SCRIPT) as running:
        client = running.client
        await client.submit(shell_task("talk", TALK))
        install_shell(monkeypatch, "1.5.0")
        async with running.node():
            await client.wait(["talk"], timeout=60)
        install_shell(monkeypatch, "1.6.0")
        async with running.node():
            await client.branch("talk.0", calls=1)
            _, branch = await client.wait(["talk"], timeout=60)
            view = await client.replay("talk.0")
            (replay,) = await client.wait([view.task_id], timeout=60)
    for result in (branch, replay):
        assert (result.status, result.failure, result.attempt) == (
            SessionStatus.FAILED,
            FailureReason.TASK,
            1,
        )
        assert "is of shell 1.5.0; this node has shell 1.6.0" in (result.error or "")


async def test_a_recording_of_another_model_is_refused(tmp_path: Path) -> None:
    async with system(tmp_path, SCRIPT) as running:
        client = running.client
        await client.submit(shell_task("talk", TALK))
        async with running.node():
            await client.wait(["talk"], timeout=60)
        running.engine.info = replace(running.engine.info, name="another")
        async with running.node():
            await client.branch("talk.0", calls=1)
            _, branch = await client.wait(["talk"], timeout=60)
    assert (branch.status, branch.failure, branch.attempt) == (SessionStatus.FAILED, FailureReason.TASK, 1)
    assert "is of scripted" in (branch.error or "")
    assert "serves another" in (branch.error or "")
