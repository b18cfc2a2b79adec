"""What every harness promises, for each that is registered here, built in or installed beside Polar.

The real programs run unmodified in both sandboxes, through the whole chain, against a scripted engine. A
harness that is not in `CASES` is tested without a tool; with a line there its tools are tried too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from polar.config import plugins
from polar.harnesses import preset
from polar.harnesses.base import Harness, HarnessContext
from polar.models.component import Component
from polar.models.session import AgentEnd, SessionStatus
from tests.rollouts import HUGE_INSTRUCTION, assert_rolled_out, roll_out, roll_out_twice, scripted_call

KEY = "the-session's-secret"
WRITE = "echo hello > hello.txt"


@dataclass(frozen=True)
class Case:
    """What a test must know of a harness to play its model."""

    calls: tuple[str, ...] = ()
    """Ways to write the file with the harness's own tools, one model call each."""
    ends_with: str = "Done."
    tools: frozenset[str] = frozenset()
    """Some of what it offers by itself."""
    dialect: str | None = None
    limits_answers: bool = True
    """Whether it asks for no more tokens than the policy may answer with."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those it cannot do without, or with which one instruction is one model call."""


CASES = {
    "acp": Case(options={"command": "true"}),
    "aider": Case(ends_with="hello.txt\n```\nhello\n```", dialect="openai_chat"),
    "claude_code": Case(
        calls=(scripted_call("Bash", command=WRITE, description="Write hello"),),
        tools=frozenset({"Bash", "Edit", "Read", "Write"}),
        dialect="anthropic_messages",
        options={"bare": True},
    ),
    "codex": Case(
        calls=(
            scripted_call("exec_command", cmd=WRITE),
            scripted_call(
                "apply_patch", input="*** Begin Patch\n*** Add File: hello.txt\n+hello\n*** End Patch\n"
            ),
        ),
        tools=frozenset({"exec_command", "write_stdin", "apply_patch"}),
        dialect="openai_responses",
        limits_answers=False,
    ),
    "continue_cli": Case(
        calls=(scripted_call("Bash", command=WRITE),),
        tools=frozenset({"Bash", "Edit", "Read", "Write"}),
        dialect="openai_chat",
    ),
    "copilot": Case(
        calls=(scripted_call("bash", command=WRITE, description="Write hello"),),
        tools=frozenset({"bash", "create", "edit", "view"}),
        dialect="openai_chat",
    ),
    "gemini_cli": Case(
        calls=(scripted_call("run_shell_command", command=WRITE, description="Write hello"),),
        tools=frozenset({"run_shell_command", "read_file", "replace", "write_file"}),
        dialect="google_generate",
    ),
    "gptme": Case(
        calls=(scripted_call("shell", command=WRITE),),
        ends_with=scripted_call("complete"),
        tools=frozenset({"shell", "save", "patch", "complete"}),
        dialect="openai_chat",
        limits_answers=False,
    ),
    "kilo": Case(
        calls=(scripted_call("bash", command=WRITE, description="Write hello"),),
        tools=frozenset({"bash", "edit", "read", "write"}),
        dialect="openai_chat",
    ),
    "mini_swe_agent": Case(
        calls=(scripted_call("bash", command=WRITE),),
        ends_with=scripted_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        tools=frozenset({"bash"}),
        dialect="openai_chat",
    ),
    "opencode": Case(
        calls=(scripted_call("bash", command=WRITE, description="Write hello"),),
        tools=frozenset({"bash", "edit", "read", "write"}),
        dialect="openai_chat",
    ),
    "pi": Case(
        calls=(scripted_call("bash", command=WRITE),),
        tools=frozenset({"bash", "edit", "read", "write"}),
        dialect="openai_chat",
        options={"compaction": False},
    ),
    "qwen_code": Case(
        calls=(
            scripted_call("run_shell_command", command=WRITE, is_background=False, description="Write hello"),
        ),
        tools=frozenset({"run_shell_command", "read_file", "edit", "write_file"}),
        dialect="openai_chat",
    ),
    "shell": Case(options={"command": "true"}),
}

PRESETS = preset.names()
"""They are tried by `make test-agents`, since their packages are large."""
HARNESSES = [name for name in plugins.names("harnesses") if name not in PRESETS]
AGENTS = [name for name in HARNESSES if name not in ("acp", "shell")]
"""Those that ask a model by themselves; the others run any program."""
WITH_SYSTEM_PROMPT = [
    name for name in AGENTS if "system_prompt" in plugins.load("harnesses", name).Options.model_fields
]


def case(name: str) -> Case:
    return CASES.get(name, Case())


def harness(name: str) -> Harness:
    made: Harness = plugins.create("harnesses", "harness", Component(name=name, options=case(name).options))
    return made


def context(instruction: str, paths: Mapping[PurePosixPath, PurePosixPath] | None = None) -> HarnessContext:
    return HarnessContext(
        instruction=instruction,
        model="policy/small",
        gateway_url="http://127.0.0.1:9",
        key=KEY,
        workspace=PurePosixPath("/workspace"),
        home=PurePosixPath("/home"),
        tmp=PurePosixPath("/tmp"),
        max_context=8192,
        max_tokens=512,
        paths=_Anywhere() if paths is None else paths,
    )


class _Anywhere(dict[PurePosixPath, PurePosixPath]):
    """Every installation where it asks to be."""

    def __missing__(self, target: PurePosixPath) -> PurePosixPath:
        return target


@pytest.mark.parametrize("name", [*HARNESSES, *PRESETS])
def test_configuration_is_pure_and_keeps_the_key_off_the_command_line(name: str) -> None:
    asked = context("Say hello.")
    one, other = harness(name), harness(name)
    assert (one.files(asked), one.command(asked)) == (other.files(asked), other.command(asked))
    command = one.command(asked)
    assert not [word for word in command.argv if KEY in word], "process lists show arguments to everybody"
    assert all(path.is_absolute() for path in one.files(asked))


@pytest.mark.parametrize("runtime", ["process", "bubblewrap"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(name, call, id=f"{name}-{number}")
        for name in AGENTS
        for number, call in enumerate(case(name).calls or (None,), start=1)
    ],
)
async def test_a_tool_is_used_and_the_second_turn_extends_the_first(
    tmp_path: Path, name: str, call: str | None, runtime: str
) -> None:
    expected = case(name)
    script = [expected.ends_with] if call is None else [call, expected.ends_with]
    rollout = await roll_out(tmp_path / "data", name, script, runtime=runtime)
    if call is None:
        result = rollout.result
        assert (result.status, result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.EXITED)
        return
    assert_rolled_out(rollout)
    first, _second = rollout.recording.completions
    assert first.dialect == expected.dialect
    assert expected.tools <= {tool.name for tool in first.tools}
    if expected.limits_answers:
        assert first.asked.max_tokens == 4096


@pytest.mark.parametrize("name", [name for name in AGENTS if case(name).calls])
async def test_a_session_is_replayed_from_its_recording(tmp_path: Path, name: str) -> None:
    expected = case(name)
    script = [expected.calls[0], expected.ends_with]
    first, second = await roll_out_twice(tmp_path / "data", name, script, **expected.options)
    assert (second.result.status, second.result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.EXITED)
    assert second.result.reward == first.result.reward == 1.0
    report = second.result.replay
    assert report is not None
    assert report.is_faithful, report
    assert (report.calls, second.result.stats.trainable_tokens) == (first.result.stats.completions, 0)
    for one, again in zip(first.recording.completions, second.recording.completions, strict=True):
        assert (one.id, one.response) == (again.id, again.response)
        assert np.array_equal(one.prompt_ids, again.prompt_ids)
        assert np.array_equal(one.sampled_ids, again.sampled_ids)


@pytest.mark.parametrize("instruction", [HUGE_INSTRUCTION, "/help @nobody there"], ids=["huge", "slash"])
@pytest.mark.parametrize("name", AGENTS)
async def test_any_instruction_arrives_as_it_is(tmp_path: Path, name: str, instruction: str) -> None:
    expected = case(name)
    rollout = await roll_out(
        tmp_path / "data", name, [expected.ends_with], instruction=instruction, options=expected.options
    )
    asked = rollout.recording.completions[0]
    assert instruction in asked.messages[-1].content


@pytest.mark.parametrize("name", WITH_SYSTEM_PROMPT)
async def test_the_system_prompt_can_be_replaced_and_appended_to(tmp_path: Path, name: str) -> None:
    options = {**case(name).options, "system_prompt": "You are terse."}
    is_appended = "append_system_prompt" in plugins.load("harnesses", name).Options.model_fields
    if is_appended:
        options["append_system_prompt"] = "--Be brave."
    rollout = await roll_out(tmp_path / "data", name, [case(name).ends_with], options=options)
    texts = [message.content for message in rollout.recording.completions[0].messages]
    assert "You are terse." in texts[0]
    assert is_appended == any("--Be brave." in text for text in texts)
