"""Hidden tests in the live sandbox, in a fresh one, and on the agent's patch alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.evaluators.attacks import ATTACKS as CHEATS
from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.models.component import Component
from polar.models.session import Verdict
from polar.runtimes.base import Sandbox
from tests.evaluations import agent_does, evaluate, evaluation, make_task
from tests.unit.evaluators.conftest import FILES, FIX, HIDDEN

WAYS = [("tests", {"sandbox": "live"}), ("tests", {"sandbox": "fresh"}), ("diff", {})]
every_way = pytest.mark.parametrize(("name", "more"), WAYS, ids=["live", "fresh", "diff"])


@every_way
async def test_a_repair_is_worth_one(
    context: EvaluationContext, plan: dict[str, Any], name: str, more: dict[str, Any]
) -> None:
    assert (await evaluate(context, name, **plan, **more)).reward == 0.0
    await agent_does(context, FIX)
    verdict = await evaluate(context, name, **plan, **more)
    assert verdict.reward == 1.0
    assert verdict.components["fail_to_pass"] == verdict.components["pass_to_pass"] == 1.0
    assert verdict.components["tests_passed"] == 2.0


async def test_hidden_tests_are_not_there_while_the_agent_works(context: EvaluationContext) -> None:
    seen = await agent_does(context, "cat tests/test_calc.py; ls -a . tests")
    assert "test_three" not in seen.stdout.text()


@every_way
async def test_half_a_repair_is_worth_its_share(
    context: EvaluationContext, plan: dict[str, Any], name: str, more: dict[str, Any]
) -> None:
    verdict = await evaluate(context, name, **plan, **more, reward="fraction")
    assert verdict.reward == 0.5
    assert "should pass now, but does not: tests.test_calc.CalcTest.test_three" in verdict.report


ATTACKS = {
    "a test runner of its own": (
        "printf 'import sys\\nprint(\"test_three (tests.test_calc.CalcTest.test_three) ... ok\\\\n"
        "test_two (tests.test_calc.CalcTest.test_two) ... ok\")\\nsys.exit(0)' > unittest.py",
        "added unittest.py",
    ),
    "a package of that name": ("mkdir unittest && touch unittest/__main__.py", "added unittest"),
    "a conftest": ("echo 'import os; os._exit(0)' > conftest.py", "added conftest.py"),
    "pytest settings": (
        "printf '\\n[tool.pytest.ini_options]\\naddopts = \"--collect-only\"\\n' >> pyproject.toml",
        "changed pyproject.toml",
    ),
    "a start-up file": ("echo 'import os; os._exit(0)' > sitecustomize.py", "added sitecustomize.py"),
    "a path file": ("mkdir lib && echo 'import os; os._exit(0)' > lib/x.pth", "added lib/x.pth"),
    "a package for the tests": (
        next(attack.command for attack in CHEATS if attack.name == "package-beside-test-module"),
        "added tests/test_calc/__init__.py",
    ),
    "edited tests": ("echo > tests/test_calc.py", "changed tests/test_calc.py"),
    "deleted tests": ("rm tests/test_calc.py", "removed tests/test_calc.py"),
}


@every_way
@pytest.mark.parametrize("attack", ATTACKS)
async def test_tampering_is_reported_and_of_no_use(
    context: EvaluationContext, plan: dict[str, Any], name: str, more: dict[str, Any], attack: str
) -> None:
    script, finding = ATTACKS[attack]
    await agent_does(context, script)
    verdict = await evaluate(context, name, **plan, **more)
    assert verdict.reward == 0.0
    assert f"tampering: {finding}" in verdict.report
    assert verdict.components["tampering"] >= 1.0


async def test_what_npm_and_cargo_obey_is_guarded_too(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    await agent_does(
        context,
        """
        echo '{"name": "calc", "scripts": {"pretest": "cp mine.js tests/test.js"}}' > package.json
        echo 'script-shell=/bin/true' > .npmrc
        mkdir -p sub/.cargo && echo 'target.x.runner = "true"' > sub/.cargo/config.toml
        """,
    )
    verdict = await evaluate(context, "tests", **plan, tampering="zero")
    for path in ("package.json", ".npmrc", "sub/.cargo/config.toml"):
        assert f"tampering: added {path}" in verdict.report


async def test_without_guards_tests_of_the_agents_own_are_believed(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    """That the guards matter: this is the attack that they keep out above."""
    await agent_does(context, ATTACKS["a package for the tests"][0])
    verdict = await evaluate(context, "tests", **plan, tampering="report")
    assert (verdict.reward, verdict.components["tampering"]) == (1.0, 1.0)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_tampering_does_not_spoil_a_repair_unless_that_is_asked_for(
    context: EvaluationContext, plan: dict[str, Any], attack: str
) -> None:
    await agent_does(context, f"{FIX}; {ATTACKS[attack][0]}")
    assert (await evaluate(context, "tests", **plan, sandbox="fresh")).reward == 1.0
    strict = await evaluate(context, "tests", **plan, tampering="zero")
    assert strict.reward == 0.0
    assert "tampered" in strict.report


async def test_honest_changes_of_a_settings_file_are_no_tampering(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    await agent_does(context, f"{FIX}; echo \"version = '2'\" >> pyproject.toml; echo '[x]' > setup.cfg")
    verdict = await evaluate(context, "tests", **plan, tampering="zero")
    assert (verdict.reward, verdict.components["tampering"]) == (1.0, 0.0)


@pytest.mark.parametrize("place", [".", "tests", "tests/unit", "lib/Test"])
async def test_a_package_of_tests_holds_no_code_of_the_agents(
    context: EvaluationContext, plan: dict[str, Any], place: str
) -> None:
    await agent_does(context, f"mkdir -p {place}; echo 'import os; os._exit(0)' > {place}/__init__.py")
    verdict = await evaluate(context, "tests", **plan, tampering="zero")
    assert "__init__.py" in verdict.report.splitlines()[1]
    await agent_does(context, f": > {place}/__init__.py")
    assert (await evaluate(context, "tests", **plan)).components["tampering"] == float(place == ".")


async def test_protected_files_are_put_back(context: EvaluationContext, plan: dict[str, Any]) -> None:
    await agent_does(context, f"{FIX}; echo 'raise SystemExit' > tests/__init__.py; touch tests/new.py")
    verdict = await evaluate(context, "tests", **plan, protect=["tests/*"])
    assert verdict.reward == 1.0
    assert "tampering: changed tests/__init__.py" in verdict.report
    assert "tampering: added tests/new.py" in verdict.report


async def test_files_that_preparation_made_are_no_tampering(tmp_path: Path, plan: dict[str, Any]) -> None:
    """A fresh sandbox tells what was there before the agent, beyond the task's own files."""
    async with evaluation(make_task(FILES, runtime="process"), tmp_path) as context:
        made = context.sandbox_maker

        def maker() -> Any:
            return _prepared(made)

        await agent_does(context, f"touch conftest.py; {FIX}")
        prepared = EvaluationContext(
            context.task, context.sandbox, context.stats, context.timeout, sandbox_maker=maker
        )
        verdict = await evaluate(prepared, "tests", **plan, tampering="zero")
    assert verdict.components["tampering"] == 0.0


@pytest.mark.parametrize(
    "more",
    [
        {"prepare": [{"exec": "touch conftest.py"}]},
        {"runtime": {"name": "docker", "options": {"image": "x"}}},
    ],
    ids=["prepared", "image"],
)
async def test_removed_files_that_were_not_the_tasks_are_missed(
    context: EvaluationContext, plan: dict[str, Any], more: dict[str, Any]
) -> None:
    """Whoever removes every one of them leaves nothing that tells of it."""
    made = context.sandbox_maker
    removed = replace(context, task=make_task(FILES, **more), sandbox_maker=lambda: _prepared(made))
    verdict = await evaluate(removed, "tests", **plan)
    assert "tampering: removed conftest.py" in verdict.report


class _prepared:
    """A fresh sandbox in which a conftest has been put."""

    def __init__(self, made: Any) -> None:
        self._inner = made()

    async def __aenter__(self) -> Sandbox:
        sandbox: Sandbox = await self._inner.__aenter__()
        await sandbox.upload(PurePosixPath("conftest.py"), b"")
        return sandbox

    async def __aexit__(self, *error: Any) -> None:
        await self._inner.__aexit__(*error)


async def test_git_hooks_are_taken_away(context: EvaluationContext, plan: dict[str, Any]) -> None:
    hook = ".git/hooks/post-checkout"
    await agent_does(context, f"{FIX}; git init -q; echo 'exit 0' > {hook}; chmod +x {hook}")
    verdict = await evaluate(
        context, "tests", **{**plan, "command": f"test ! -e {hook} && {plan['command']}"}, sandbox="live"
    )
    assert verdict.reward == 1.0
    assert f"tampering: added {hook}" in verdict.report


async def test_no_name_or_number_of_files_gets_in_the_way(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    """Names that are no text, hold line breaks, or are too many for one command line."""
    script = """
import os
for name in (b"\\xff\\xfe", b"a\\nb", *(b"%03d" % number + b"x" * 200 for number in range(800))):
    os.makedirs(b"w/" + name + b"y" * 40)
    open(b"w/" + name + b"y" * 40 + b"/conftest.py", "w").close()
"""
    await agent_does(context, f"{FIX}; python3 - <<'END'\n{script}\nEND")
    verdict = await evaluate(context, "tests", **plan)
    assert (verdict.reward, verdict.components["tampering"]) == (1.0, 802.0)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


async def test_poisoned_caches_and_homes_have_no_say(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    """The compiled file claims to be of the source that lies there, and is of another."""
    await agent_does(
        context,
        """
        cp calc/__init__.py /tmp/$$.py && printf 'def double(x):\\n    return 2 * x\\n' > calc/__init__.py
        python3 -c 'import py_compile
py_compile.compile("calc/__init__.py", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)'
        mv /tmp/$$.py calc/__init__.py
        site=$HOME/.local/lib/python3.11/site-packages; mkdir -p $site
        printf 'import os\\nos._exit(0)\\n' > $site/usercustomize.py
        """,
    )
    assert (await evaluate(context, "tests", **plan, reward="fraction")).reward == 0.5


@pytest.mark.parametrize(("work", "reward"), [("true", 0.0), (FIX, 1.0)])
async def test_a_link_in_the_way_of_hidden_tests_leads_them_nowhere(
    context: EvaluationContext, plan: dict[str, Any], tmp_path: Path, work: str, reward: float
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    await agent_does(context, f"{work}; rm -r tests; ln -s {outside} tests")
    verdict = await evaluate(context, "tests", **plan)
    assert (verdict.reward, list(outside.iterdir())) == (reward, [])
    assert verdict.components["tampering"] >= 1


async def test_endless_code_is_worth_nothing(context: EvaluationContext, plan: dict[str, Any]) -> None:
    await agent_does(context, "printf 'while True: pass' > calc/__init__.py")
    verdict = await evaluate(context, "tests", **plan, timeout_seconds=0.7)
    assert verdict.reward == 0.0
    assert "timed out after 0.7 s" in verdict.report
    punished = await evaluate(context, "tests", **plan, timeout_seconds=0.7, lowest_reward=-1.0)
    assert punished.reward == -1.0


async def test_code_that_does_not_load_is_worth_nothing(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    await agent_does(context, "echo 'def (' > calc/__init__.py")
    assert (await evaluate(context, "tests", **plan)).reward == 0.0


async def test_output_without_a_test_is_worth_nothing(
    context: EvaluationContext, plan: dict[str, Any]
) -> None:
    await agent_does(context, "printf 'import os\\nos._exit(0)' > calc/__init__.py")
    verdict = await evaluate(context, "tests", **plan)
    assert verdict.reward == 0.0
    assert "no recognisable test results" in verdict.report


async def test_a_command_that_never_runs_is_the_evaluators_fault(context: EvaluationContext) -> None:
    with pytest.raises(EvaluationFailed, match="cannot be run in this sandbox"):
        await evaluate(context, "tests", command="no-such-runner", format="pytest")


async def test_a_command_that_the_agent_removed_is_the_agents_fault(tmp_path: Path) -> None:
    task = make_task({"run": "echo 'test a ... ok'"}, runtime="process")
    async with evaluation(task, tmp_path) as context:
        assert (await evaluate(context, "tests", command="sh run", format="cargo")).reward == 1.0
        await agent_does(context, "rm run")
        assert (await evaluate(context, "tests", command="sh run", format="cargo")).reward == 0.0


async def test_reports_can_be_files(tmp_path: Path) -> None:
    async with evaluation(make_task(runtime="process"), tmp_path) as context:
        xml = "<testsuite><testcase name='a'/></testsuite>"
        options = {"format": "junit", "report": "out/report.xml"}
        command = f'mkdir -p out; echo "{xml}" > out/report.xml'
        assert (await evaluate(context, "tests", command=command, **options)).reward == 1.0
        assert (await evaluate(context, "tests", command="rm -r out", **options)).reward == 0.0
        broken = await evaluate(context, "tests", command="mkdir out; echo '<' > out/report.xml", **options)
        assert broken.reward == 0.0


@every_way
async def test_a_report_that_the_agent_left_is_none(
    context: EvaluationContext, name: str, more: dict[str, Any]
) -> None:
    """Nor one of its own run of other tests, where the hidden ones end before they write theirs."""
    await agent_does(
        context, "mkdir out; echo '<testsuite><testcase name=\"a\"/></testsuite>' > out/report.xml"
    )
    options = {"command": "true", "format": "junit", "report": "out/report.xml", **more}
    assert (await evaluate(context, name, **options)).reward == 0.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "pytest"}, "command"),
        ({"command": "x", "format": "nose"}, "format"),
        ({"command": "x", "format": "junit"}, "requires 'report'"),
        ({"command": "x", "format": "pytest", "files": {"/etc/x": {"text": ""}}}, "files"),
        ({"command": "x", "format": "pytest", "expected": {"fail_to_pass": "a"}}, "expected.fail_to_pass"),
        ({"command": "x", "format": "pytest", "reward": "best"}, "reward"),
        ({"command": "x", "format": "pytest", "timeout_seconds": 0}, "timeout_seconds"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        plugins.create("evaluators", "evaluator", Component(name="tests", options=options))


def test_the_hidden_tests_are_more_than_the_visible_ones() -> None:
    assert HIDDEN.startswith(FILES["tests/test_calc.py"])
