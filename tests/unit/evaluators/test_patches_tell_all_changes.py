"""The agent's patch, whatever the agent did to git."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.diff import apply_patch, extract_patch, touched_files
from tests.evaluations import agent_does, evaluate, evaluation, make_task
from tests.unit.evaluators.conftest import FIX


async def patch_of(context: EvaluationContext, *exclude: str, limit: int = 1_000_000) -> bytes:
    async with context.fresh_sandbox() as fresh:
        return await extract_patch(context, fresh, exclude, limit)


async def test_nothing_done_is_an_empty_patch(context: EvaluationContext) -> None:
    assert await patch_of(context) == b""


async def test_a_patch_makes_the_agents_files_out_of_the_tasks(context: EvaluationContext) -> None:
    """Changed, new, removed, binary, executable, linked, oddly named; ignored files are left out."""
    await agent_does(
        context,
        r"""
        echo '# more' >> calc/__init__.py; mkdir -p deep/er; echo new > deep/er/file.txt; rm tests/__init__.py
        printf '\000\001\377' > picture.bin; printf '#!/bin/sh\n' > run.sh; chmod +x run.sh
        ln -s calc/__init__.py link; echo x > 'a name with "quotes" and ü.txt'; printf 'no newline' > last
        printf 'a\r\nb\r\n' > windows.txt; echo noise > debug.log
        mkdir __pycache__; echo x > __pycache__/x.pyc
        """,
    )
    listing = (
        "find . ! -type d ! -name '*.log' ! -name '*.pyc' -exec ls -ln {} + | awk '{print $1, $9, $10, $11}'"
    )
    sums = "find . -type f ! -name '*.log' ! -name '*.pyc' -exec sha256sum {} + | sort"
    script = f"{listing} | sort; {sums}"
    wanted = (await agent_does(context, script)).stdout.text()
    patch = await patch_of(context)
    async with context.fresh_sandbox() as fresh:
        assert await apply_patch(fresh, patch, timeout=30) is None
        made = await agent_does(context.with_sandbox(fresh), script)
        assert made.stdout.text() == wanted
    assert b"debug.log" not in patch
    assert b"pyc" not in patch


async def test_excluded_paths_are_left_out(context: EvaluationContext) -> None:
    await agent_does(
        context, f"{FIX}; echo x >> tests/test_calc.py; echo y > tests/more.py; echo z > notes.md"
    )
    assert touched_files(await patch_of(context, "tests/**", "*.md")) == ("calc/__init__.py",)


GIT_TRICKS = {
    "a repository of its own": (
        "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm x"
    ),
    "a broken repository": "git init -q && echo garbage > .git/HEAD && rm -rf .git/objects",
    "a filter": (
        "git init -q && git config filter.x.clean 'touch WITNESS; cat /dev/null' && "
        "git config filter.x.required true && echo '* filter=x' > .gitattributes"
    ),
    "an external diff": (
        "git init -q && git config diff.external 'touch WITNESS #' && "
        "git config diff.x.textconv true && echo '* diff=x' > .gitattributes"
    ),
    "a monitor": "git init -q && git config core.fsmonitor 'touch WITNESS #'",
    "configuration at home": (
        "git config --global core.hooksPath /tmp && git config --global core.attributesFile /dev/zero"
    ),
    "a link for .git": "ln -s /nonexistent .git",
    "a file for .git": "echo 'gitdir: /nonexistent' > .git",
    "a repository within": "git init -q calc && git -C calc add -A",
    "line endings": "echo '* text eol=crlf' > .gitattributes",
    "binary attributes": "echo '* -diff' > .gitattributes",
    "everything ignored": "echo '*' > .gitignore",
    "an index lock": "git init -q && touch .git/index.lock",
}


@pytest.mark.parametrize("trick", GIT_TRICKS)
async def test_what_the_agent_did_to_git_has_no_say(
    context: EvaluationContext, plan: dict[str, Any], trick: str, tmp_path: Path
) -> None:
    witness = tmp_path / "a-command-of-the-agent-was-run"
    await agent_does(context, f"{FIX}; {GIT_TRICKS[trick].replace('WITNESS', str(witness))}")
    verdict = await evaluate(context, "diff", **plan)
    assert verdict.reward == 1.0, verdict.report
    assert not witness.exists()
    assert context.artifacts is not None
    assert b"return 2 * x" in (context.artifacts / "patch.diff").read_bytes()


async def test_a_patch_over_its_limit_is_worth_nothing(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    await agent_does(context, f"{FIX}; head -c 100000 /dev/urandom > noise.bin")
    verdict = await evaluate(context, "diff", **plan, max_patch_bytes=50_000)
    assert (verdict.reward, verdict.report) == (0.0, "the patch is larger than 50000 bytes")
    assert (await evaluate(context, "diff", **plan)).components["patch_files"] == 2.0


async def test_a_workspace_that_cannot_be_carried_is_worth_nothing(
    context: EvaluationContext, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.evaluators.workspace.ARCHIVE_BYTES", 100_000)
    await agent_does(context, f"{FIX}; truncate -s 10G large")
    for name, more in (("diff", {}), ("tests", {"sandbox": "fresh"})):
        verdict = await evaluate(context, name, **plan, **more)
        assert verdict.reward == 0.0
        assert "cannot be copied" in verdict.report


async def test_a_sandbox_without_git_is_the_evaluators_fault(tmp_path: Path, plan: dict[str, Any]) -> None:
    async with evaluation(make_task(runtime="process"), tmp_path) as context:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("polar.evaluators.diff.CLEAN_GIT", {"PATH": str(tmp_path)})
            with pytest.raises(EvaluationFailed, match="no git"):
                await evaluate(context, "diff", **plan)
