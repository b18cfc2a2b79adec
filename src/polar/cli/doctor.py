"""`polar doctor`: checks this machine and its engine, and says how to fix problems."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.options import AsJson, ConfigFile, EngineKind
from polar.cli.output import print_json_line, say, visible
from polar.config.settings import EngineSettings, Settings

if TYPE_CHECKING:
    from polar.app.doctor import Finding

EMBEDDED = "embedded"
_SIGNS = {
    "ok": ("✓", typer.colors.GREEN),
    "warning": ("!", typer.colors.YELLOW),
    "problem": ("✗", typer.colors.RED),
}

Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL|embedded",
        help="Also check this engine; repeat for replicas. embedded starts one for the check. Default: the"
        " engine in the settings, if any.",
    ),
]
Model = Annotated[str | None, typer.Option(help="The model that the engine serves.")]


def doctor(
    config: ConfigFile = None,
    engine: Engines = None,
    engine_kind: EngineKind = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, its settings and the engine, and say how to fix problems.

    Checks Python, harnesses, sandboxes, ports and disk. Exits with 1 if sessions would fail. Installs nothing
    and changes no engine.

    Example: polar doctor --engine http://gpu:8000
    """

    async def look() -> list[Finding]:
        found = []
        async for finding in _findings(config, engine or [], {"kind": engine_kind, "model": model}):
            found.append(finding)
            print_json_line(finding) if as_json else _show(finding)
        return found

    levels = [finding.level.value for finding in asyncio.run(look())]
    problems = levels.count("problem")
    if not as_json:
        typer.echo(f"\n{len(levels)} checks: {problems} problems, {levels.count('warning')} warnings")
    if problems:
        raise typer.Exit(1)


async def _findings(config: Path | None, engines: list[str], asked: dict[str, Any]) -> AsyncIterator[Finding]:
    from polar.app import doctor

    settings, finding = doctor.check_settings(config)
    yield finding
    settings = _with_engine(settings, engines, asked)
    async for found in doctor.findings(settings):
        yield found
    if engines or settings.engine.urls:
        async for found in doctor.engine_findings(settings, say):
            yield found


def _with_engine(settings: Settings, engines: list[str], asked: dict[str, Any]) -> Settings:
    said = settings.engine.model_dump(exclude_unset=True)
    said |= {name: value for name, value in asked.items() if value is not None}
    if engines:
        urls = [url for url in engines if url != EMBEDDED]
        said |= {"url": urls} if urls else {"url": None, "kind": EMBEDDED}
    return settings.model_copy(update={"engine": EngineSettings.model_validate(said)})


def _show(finding: Finding) -> None:
    sign, colour = _SIGNS[finding.level]
    typer.secho(f"{sign} ", fg=colour, nl=False)
    typer.echo(f"{finding.area}: {finding.name}: {visible(finding.detail)}")
    if finding.fix:
        typer.echo(f"    → {visible(finding.fix)}")
