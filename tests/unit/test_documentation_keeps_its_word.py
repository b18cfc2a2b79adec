"""What pages quote and show is so: messages are in the code, code blocks run, reference covers everything."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from mkdocs.structure.files import Files
from typer.main import get_command

import polar
from polar.cli.main import COMMANDS, app
from polar.config import plugins
from polar.config.settings import Settings
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models import dashboard
from polar.models.chat import FinishReason
from polar.models.session import TrajectoryStats
from polar.models.task import TaskSpec
from polar.recordings.tree import TokenTree
from polar.rollout.server import create_app
from polar.runtimes.base import Host, SandboxSpec
from polar.runtimes.process import ProcessRuntime
from tests.fakes.recordings import recording
from tools.documentation import cli_reference, hooks, python_reference, rest_reference, settings_reference

SOURCE = Path(polar.__file__).parent
DOCS = SOURCE.parents[1] / "docs"


def messages() -> set[str]:
    """Every text in the code; what a text leaves open is `…`."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(map(str, parts)))
    return found


def quoted() -> list[str]:
    """The messages in the headings of the page about them."""
    headings = re.findall(r"^### (.*`.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [message for heading in headings for message in re.findall(r"`([^`]*)`", heading)]


def test_troubleshooting_quotes_messages_that_exist() -> None:
    known = messages()
    assert len(quoted()) > 20
    assert not [quote for quote in quoted() if not any(quote.removesuffix("…") in text for text in known)]


def test_the_page_of_providers_names_addresses_that_are_answered() -> None:
    page = (DOCS / "providers.md").read_text()
    named = set(re.findall(r"`(/[^`…]+)`", page[: page.index("## What a request becomes")]))
    dialects = [plugins.load("dialects", name)() for name in plugins.names("dialects")]
    paths = {
        dialect.name: {route.path.replace(":.+", "") for route in dialect.routes} for dialect in dialects
    }
    answered = set[str]().union(*paths.values())
    assert not [each for each in named if not any(path.startswith(each) for path in answered)]
    assert not [name for name, known in paths.items() if named.isdisjoint(known)], "each is on the page"


def python_block(page: str, number: int = 0) -> dict[str, Any]:
    """What a page's code defines."""
    text = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)[number]
    names: dict[str, Any] = {}
    exec(text, names)
    return names


@pytest.mark.parametrize(("written", "reward"), [("a\nb\n", 1.0), ("a\n", 0.2), (None, 0.0)])
async def test_the_evaluator_of_the_guide_scores(tmp_path: Path, written: str | None, reward: float) -> None:
    evaluator_class = python_block("guides/tasks.md")["LineCount"]
    evaluator = evaluator_class(evaluator_class.Options(path="out.txt", lines=2))
    assert await score(evaluator, tmp_path, "out.txt", written) == reward


@pytest.mark.parametrize(("written", "reward"), [("short", 1.0), ("long" * 9, 0.0), (None, 0.0)])
async def test_the_evaluator_of_the_reference_scores(
    tmp_path: Path, written: str | None, reward: float
) -> None:
    evaluator_class = python_block("evaluators.md")["ShortAnswer"]
    evaluator = evaluator_class(evaluator_class.Options(most=10))
    assert await score(evaluator, tmp_path, "answer.txt", written) == reward


async def test_the_evaluator_of_turns_on_the_page_scores_each() -> None:
    evaluator_class = python_block("evaluators.md", 2)["acts"]
    task = TaskSpec(id="guide", instruction="x", harness="shell", evaluator="command")
    turns = list(recording().completions)
    turns[0] = replace(turns[0], finish_reason=FinishReason.TOOL_CALLS)
    context = EvaluationContext(task, MagicMock(), TrajectoryStats(), 30.0, completions=lambda: turns)
    verdict = await evaluator_class(evaluator_class.Options()).evaluate(context)
    assert verdict.trace_rewards == {turn.id: float(turn is turns[0]) for turn in turns}


def test_the_branching_strategy_of_the_page_chooses() -> None:
    strategy_class = python_block("trajectories.md")["LongestTurn"]
    strategy = strategy_class(strategy_class.Options())
    assert strategy.points(recording().tree) == (1,)
    assert strategy.points(TokenTree()) == ()


async def score(evaluator: Evaluator, tmp_path: Path, name: str, written: str | None) -> float:
    """What it gives a workspace with this file, or without."""
    runtime = ProcessRuntime(ProcessRuntime.Options())
    sandbox = await runtime.start(SandboxSpec("guide", "127.0.0.1", 1), Host(tmp_path))
    try:
        if written is not None:
            await sandbox.upload(sandbox.workspace / name, written.encode())
        task = TaskSpec(id="guide", instruction="x", harness="shell", evaluator="command")
        context = EvaluationContext(task=task, sandbox=sandbox, stats=TrajectoryStats(), timeout=30)
        return (await evaluator.evaluate(context)).reward
    finally:
        await sandbox.stop()


def linked(markdown: str, page: str = "tasks.md") -> str:
    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return hooks.on_page_markdown(markdown, place, None, Files([]))


def test_links_out_of_the_pages_become_text_and_broken_ones_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (
        linked("[`swe-mini`](../examples/swe-mini) and [x](verify.md#cost)")
        == "`swe-mini` and [x](verify.md#cost)"
    )
    assert linked("[a](../docs/tasks.md)", "contributing.md") == "a"
    assert linked("```\n[a](../nowhere)\n```") == "```\n[a](../nowhere)\n```"
    assert linked("[a](docs/tasks.md)", "contributing.md") == "[a](tasks.md)"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert linked("[a](../nowhere)") == "a"
    assert "../nowhere, which is not in the repository" in caplog.records[-1].getMessage()


def yaml_blocks() -> Iterator[tuple[str, str]]:
    for page in ("guides/harness.md", "guides/tasks.md"):
        for text in re.findall(r"^```yaml\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL):
            yield page, text


def test_the_tasks_of_the_guides_are_sound() -> None:
    whole = [yaml.safe_load(text) for _, text in yaml_blocks()]
    tasks = [document for document in whole if "id" in document]
    tasks += [
        {**document["defaults"], **task}
        for document in whole
        if "tasks" in document
        for task in document["tasks"]
    ]
    assert len([TaskSpec.model_validate(task) for task in tasks]) == 2


def test_the_reference_leaves_nothing_out() -> None:
    commands = cli_reference.page()
    assert not [name for name in COMMANDS if f"## polar {name}\n" not in commands]
    settings = settings_reference.configuration_page()
    assert not [name for name in Settings.model_fields if f"`{name}`" not in settings]
    routes = rest_reference.page()
    document = create_app(MagicMock(), MagicMock()).openapi()
    operations = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert not [name for name in operations if f"## {name}\n" not in routes]
    assert "### Client.submit\n" in python_reference.client_page()
    assert "### Harness.command\n" in python_reference.plugins_page()
    assert "| `max_turns` |" in settings_reference.options_page()
    assert "| `max_importance` |" in settings_reference.training_page()


@pytest.mark.parametrize(
    "page",
    [
        settings_reference.configuration_page,
        settings_reference.training_page,
        settings_reference.options_page,
        rest_reference.page,
    ],
)
def test_the_reference_says_what_every_field_is(page: Callable[[], str]) -> None:
    # Fields of the dashboard's bodies are named plainly; a docstring says only what a name does not.
    plain = {
        name for name, cls in vars(dashboard).items() if getattr(cls, "__module__", "") == dashboard.__name__
    }
    sections = [part for part in re.split(r"^### ", page(), flags=re.M) if part.split()[0] not in plain]
    fields = [line for part in sections for line in part.splitlines() if line.startswith("| `")]
    assert len(fields) > 30
    # An id in a path is what it is called, and a schema has a place of its own to say what it is.
    told_elsewhere = re.compile(r"\| path \||\]\(#schema-")
    assert not [line for line in fields if line.endswith("|  |") and not told_elsewhere.search(line)]


def named_commands() -> Iterator[tuple[str, list[str]]]:
    """Each `polar …` that a page names in its text, with the page."""
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for text in re.findall(r"`polar ([a-z][^`\n]*)`", page.read_text()):
            yield page.name, text.split()


def test_commands_that_pages_name_exist() -> None:
    group: Any = get_command(app)
    for page, words in named_commands():
        assert words[0] in COMMANDS, f"{page}: polar {' '.join(words)}"
        command = group.get_command(None, words[0])
        inner = getattr(command, "commands", {})
        follows = [word for word in words[1:2] if not word.startswith(("-", "…", "("))]
        takes_argument = any(one.param_type_name == "argument" for one in command.params)
        assert not follows or not inner or takes_argument or follows[0] in inner, f"{page}: {words}"
        known = [one for part in (command, inner.get("".join(follows))) if part for one in part.params]
        names = {"--help", *(name for one in known for name in (*one.opts, *one.secondary_opts))}
        given = {re.split(r"[=\]),]", word)[0] for word in words if word.startswith("--") and word != "--"}
        assert words[0] == "proxy" or given <= names, f"{page}: polar {' '.join(words)}"
