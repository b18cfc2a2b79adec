"""A model that knows what to do: it plays commands through a harness's own shell tool, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polar.engines.base import GenerateRequest
from tests.fakes.scripted_engine import ScriptedEngine
from tests.rollouts import scripted_call

TURN = "<|im_start|>assistant"

Shell = Callable[[str], str]
"""How a harness's model runs a command."""


@dataclass(frozen=True)
class Agent:
    """What a teacher must know of a harness."""

    dialect: str
    shell: Shell
    ends_with: str = "Done."
    options: Mapping[str, Any] | None = None


def _tool(name: str, argument: str = "command", **others: Any) -> Shell:
    return lambda command: scripted_call(name, **{argument: command}, **others)


AGENTS = {
    "claude_code": Agent("anthropic_messages", _tool("Bash", description="Work"), options={"bare": True}),
    "codex": Agent("openai_responses", _tool("exec_command", "cmd")),
    "gemini_cli": Agent("google_generate", _tool("run_shell_command", description="Work")),
    "mini_swe_agent": Agent(
        "openai_chat",
        _tool("bash"),
        scripted_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "opencode": Agent("openai_chat", _tool("bash", description="Work")),
    "pi": Agent("openai_chat", _tool("bash")),
    "qwen_code": Agent("openai_chat", _tool("run_shell_command", is_background=False, description="Work")),
}


class Teacher:
    """Plays the next command of whichever instruction a prompt is about."""

    def __init__(self, engine: ScriptedEngine, agent: Agent, commands: Mapping[str, Sequence[str]]) -> None:
        self._tokenizer = engine.tokenizer
        self._agent = agent
        self._commands = commands

    def prompt(self, request: GenerateRequest) -> str:
        ids = [int(id) for id in request.prompt_ids]
        shown: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return shown

    def answer(self, request: GenerateRequest) -> str:
        prompt = self.prompt(request)
        asked = max(
            (text for text in self._commands if text in prompt),
            key=lambda text: (prompt.rindex(text) + len(text), len(text)),
            default=None,
        )
        if asked is None:
            return self._agent.ends_with
        turn = prompt[prompt.rindex(asked) :].count(TURN) - 1
        commands = self._commands[asked]
        return self._agent.shell(commands[turn]) if turn < len(commands) else self._agent.ends_with
