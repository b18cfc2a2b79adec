"""What of a workspace is the agent's work, and what stays the task's because it steers the grading."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.tampering import GUARDED, Change, TamperingFound, compare, find_expression
from polar.evaluators.workspace import EVERYTHING, pack, replace_workspace
from tests.evaluations import agent_does, evaluate, evaluation, make_task

FILES = {
    "src/calc.py": "1",
    "docs/notes.txt": "1",
    "Makefile": "all:\n",
    "node_modules/tool/index.js": "task's",
    "vite.config.ts": "task's",
}


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[EvaluationContext]:
    async with evaluation(make_task(FILES, runtime="process"), tmp_path) as made:
        yield made


async def test_only_what_is_allowed_is_carried(context: EvaluationContext) -> None:
    await agent_does(
        context, "echo 2 > src/calc.py; echo 2 > src/new.py; echo 2 > docs/notes.txt; touch stray"
    )
    check = "grep -qx 2 src/calc.py && grep -qx 2 src/new.py && grep -qx 1 docs/notes.txt && test ! -e stray"
    assert (await evaluate(context, "command", command=check, allow=["src/*"])).reward == 1.0
    assert (
        await evaluate(context, "command", command="grep -qx 2 docs/notes.txt && test -e stray")
    ).reward == 1.0


async def test_of_directories_only_those_that_are_allowed_or_hold_such_files_are_carried(
    context: EvaluationContext,
) -> None:
    await agent_does(context, "mkdir -p src/new/empty 'logs/$(id).txt' docs/a/b; echo > docs/a/b/allowed.md")
    found = "find . -mindepth 1 -type d ! -path './node_modules*' | sort | tr '\\n' ' '"
    check = f'[ "$({found})" = "./docs ./docs/a ./docs/a/b ./src ./src/new ./src/new/empty " ]'
    allow = ["src/*", "docs/a/b/allowed.md"]
    verdict = await evaluate(context, "command", command=f"{found}; {check}", allow=allow)
    assert verdict.reward == 1.0, verdict.report


async def test_what_was_removed_and_made_is_carried(context: EvaluationContext) -> None:
    await agent_does(context, "rm -r docs; mkdir -p empty/deep; ln -s src/calc.py link; chmod +x src/calc.py")
    check = "test ! -e docs && test -d empty/deep && test -L link && test -x src/calc.py"
    assert (await evaluate(context, "command", command=check)).reward == 1.0


async def test_what_is_installed_is_the_tasks(context: EvaluationContext) -> None:
    await agent_does(
        context, "echo mine > node_modules/tool/index.js; mkdir -p .venv/bin; touch .venv/bin/python"
    )
    check = 'grep -qx "task\'s" node_modules/tool/index.js && test ! -e .venv'
    assert (await evaluate(context, "command", command=check)).reward == 1.0
    named = {"allow": ["*", "node_modules/*", ".venv/*"]}
    check = "grep -qx mine node_modules/tool/index.js && test -e .venv/bin/python"
    assert (await evaluate(context, "command", command=check, **named)).reward == 1.0


async def test_a_link_named_as_what_is_installed_is_not_carried(context: EvaluationContext) -> None:
    """Through it the agent's files would be found where installed programs are looked for."""
    links = "ln -s mine .venv; ln -s ../mine src/venv"
    await agent_does(context, f"mkdir -p mine/bin; touch mine/bin/python; {links}")
    check = "test -e mine/bin/python && test ! -e .venv && test ! -e src/venv"
    assert (await evaluate(context, "command", command=check)).reward == 1.0


async def test_a_link_to_what_is_installed_elsewhere_stays_the_task_s(context: EvaluationContext) -> None:
    await agent_does(context, "mkdir mine; ln -s mine .venv")
    archive = await pack(context)
    async with context.fresh_sandbox() as fresh:
        as_task = replace(context, sandbox=fresh)
        await agent_does(as_task, "mkdir theirs; ln -s theirs .venv")
        await replace_workspace(fresh, archive, EVERYTHING, timeout=30)
        await agent_does(as_task, '[ "$(readlink .venv)" = theirs ] && test -d mine')


async def test_a_file_that_steers_counts_as_work_only_by_its_name(context: EvaluationContext) -> None:
    await agent_does(context, "echo mine > vite.config.ts")
    undone = await evaluate(context, "command", command='grep -qx "task\'s" vite.config.ts')
    assert (undone.reward, undone.components) == (1.0, {"tampering": 1.0})
    allowed = await evaluate(
        context, "command", command="grep -qx mine vite.config.ts", allow=["*", "vite.config.ts"]
    )
    assert (allowed.reward, allowed.components) == (1.0, {})


async def test_tampering_can_be_worth_nothing(context: EvaluationContext) -> None:
    await agent_does(context, "touch conftest.py")
    verdict = await evaluate(context, "command", command="true", tampering="zero")
    assert verdict.reward == 0.0
    assert "tampering: added conftest.py" in verdict.report


async def test_files_from_the_future_are_old(context: EvaluationContext) -> None:
    await agent_does(context, "touch -d 2090-01-01 src/calc.py")
    for place in ("fresh", "live"):
        check = "test docs/notes.txt -nt src/calc.py"
        assert (await evaluate(context, "command", command=check, sandbox=place)).reward == 1.0


SMALL_TAR = """#!/bin/sh
case "$*" in *--exclude*) echo "tar: unrecognized option" >&2; exit 1;; esac
exec /bin/tar "$@"
"""
"""A tar that knows as few options as busybox's may."""


@asynccontextmanager
async def with_tar(directory: Path, tar: str) -> AsyncIterator[EvaluationContext]:
    """An evaluation in sandboxes with another tar."""
    (directory / "bin").mkdir()
    (directory / "bin" / "tar").write_text(tar)
    (directory / "bin" / "tar").chmod(0o755)
    options = {"environment": {"PATH": f"{directory}/bin:/usr/bin:/bin"}}
    task = make_task(FILES, runtime={"name": "process", "options": options})
    async with evaluation(task, directory) as made:
        yield made


@pytest.mark.parametrize("tar", [SMALL_TAR, '#!/bin/sh\nexec /bin/tar "$@"\n'], ids=["small", "GNU"])
async def test_any_tar_carries_the_work_without_its_repositories(tmp_path: Path, tar: str) -> None:
    async with with_tar(tmp_path, tar) as context:
        await agent_does(context, "echo 2 > src/calc.py; mkdir -p .git src/sub/.git; touch .git/HEAD")
        check = "grep -qx 2 src/calc.py && test -d src/sub && test ! -e .git && test ! -e src/sub/.git"
        verdict = await evaluate(context, "command", command=check)
    assert verdict.reward == 1.0, verdict.report


async def test_a_workspace_that_no_tar_packs_is_no_verdict_on_the_agent(tmp_path: Path) -> None:
    async with with_tar(tmp_path, "#!/bin/sh\nexit 1\n") as context:
        with pytest.raises(EvaluationFailed, match="evaluator-pack"):
            await evaluate(context, "command", command="true")


@pytest.mark.parametrize(
    ("path", "before", "after", "change"),
    [
        ("x.egg-info/entry_points.txt", None, "[console_scripts]\na = b:c\n", None),
        ("x.egg-info/entry_points.txt", None, "[pytest11]\na = b\n", Change.ADDED),
        ("package.json", '{"name": "a"}', '{"name": "b", "dependencies": {"c": "1"}}', None),
        ("package.json", '{"name": "a"}', '{"name": "a", "mocha": {"require": "b"}}', Change.CHANGED),
        ("package.json", "{}", '{"scripts": {"test": "true"}}', Change.CHANGED),
        ("Cargo.toml", "[package]\nname = 'a'\n", "[package]\nname = 'a'\n[dependencies]\nb = '1'\n", None),
        (
            "Cargo.toml",
            "[package]\nname = 'a'\n",
            "[package]\nname = 'a'\nautotests = false\n",
            Change.CHANGED,
        ),
        ("pyproject.toml", "", "[tool.ruff]\nline-length = 99\n", None),
        ("pyproject.toml", "", "[tool.pytest.ini_options]\naddopts = '-p x'\n", Change.CHANGED),
        ("Makefile", None, "all:\n", None),
        ("Makefile", "all:\n", "all:\n\ttrue\n", Change.CHANGED),
        (".mocharc.cjs", None, "", Change.ADDED),
        ("deep/babel.config.mjs", None, "", Change.ADDED),
    ],
)
def test_of_a_settings_file_only_what_steers_counts(
    path: str, before: str | None, after: str, change: Change | None
) -> None:
    found = compare({} if before is None else {path: before.encode()}, {path: after.encode()})
    assert found == ((TamperingFound(path, change),) if change else ())


def test_a_makefile_that_make_prefers_counts_where_the_task_has_one() -> None:
    assert compare({"Makefile": b""}, {"Makefile": b"", "GNUmakefile": b""}) == (
        TamperingFound("GNUmakefile", Change.ADDED),
    )


paths = st.sampled_from(
    [name.replace("*", "x").replace("[jt]", "j").replace("[cm]", "c") for name in GUARDED]
)
inventories = st.dictionaries(paths, st.none() | st.binary(max_size=40))


@given(inventories)
def test_nothing_changed_is_no_tampering(inventory: dict[str, bytes | None]) -> None:
    assert compare(inventory, inventory) == ()


@given(inventories, inventories)
def test_what_is_allowed_by_name_is_no_tampering(
    before: dict[str, bytes | None], after: dict[str, bytes | None]
) -> None:
    assert compare(before, after, allow=tuple(before.keys() | after.keys())) == ()
    assert compare(before, after, allow=("*",)) == compare(before, after)


@pytest.mark.parametrize("change", [str.upper, str.lower, str.title])
def test_names_are_guarded_in_whatever_case_and_directory(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    names = [change(name.replace("*", "x").replace("[jt]", "j").replace("[cm]", "c")) for name in GUARDED]
    wanted = {f"./{place}{name}" for name in names for place in ("", "some/where/")}
    for path in wanted:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "work.py").touch()
    search = ["find", ".", "!", "-type", "d", "(", *find_expression(()), ")"]
    found = subprocess.run(search, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(found.stdout.splitlines()) == wanted
