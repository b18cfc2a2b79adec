"""`polar doctor`: looks at this machine and its engine, and says how to mend what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.options import AsJson, ConfigFile, EngineKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from polar.app.doctor import Finding
    from polar.config.settings import Settings

EMBEDDED = "embedded"
_SIGNS = {
    "ok": ("✓", typer.colors.GREEN),
    "warning": ("!", typer.colors.YELLOW),
    "problem": ("✗", typer.colors.RED),
}


def doctor(
    config: ConfigFile = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="URL|embedded",
            help="Look at this engine too, repeated for replicas; embedded: start one for it. Default: the"
            " one that the settings name, if they do.",
            show_default=False,
        ),
    ] = None,
    engine_kind: EngineKind = None,
    model: Annotated[
        str | None, typer.Option(help="The model that the engine serves.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check Python, harnesses, sandboxes, ports, disk, settings and the engine, and say how to mend each.

    Exits with 1 if sessions would fail. Nothing is installed, and no engine is changed.

    Example: polar doctor --engine http://gpu:8000
    """
    import asyncio

    from polar.app.doctor import Severity
    from polar.cli.output import print_json_line

    async def look() -> list[Finding]:
        found = []
        async for finding in _findings(config, engine or [], {"kind": engine_kind, "model": model}):
            found.append(finding)
            print_json_line(finding) if as_json else _show(finding)
        return found

    found = asyncio.run(look())
    problems = sum(finding.level is Severity.PROBLEM for finding in found)
    warnings = sum(finding.level is Severity.WARNING for finding in found)
    if not as_json:
        typer.echo(f"\n{len(found)} checks: {problems} problems, {warnings} warnings")
    if problems:
        raise typer.Exit(1)


async def _findings(config: Path | None, engines: list[str], asked: dict[str, Any]) -> AsyncIterator[Finding]:
    from polar.app import doctor, doctor_engine

    settings, finding = doctor.settings_found(config)
    yield finding
    async for found in doctor.findings(settings):
        yield found
    if engines or settings.engine.urls:
        async for found in doctor_engine.findings(_with_engine(settings, engines, asked), _say):
            yield found


def _with_engine(settings: Settings, engines: list[str], asked: dict[str, Any]) -> Settings:
    from polar.config.settings import EngineSettings, Settings

    said = settings.engine.model_dump(exclude_unset=True)
    said |= {name: value for name, value in asked.items() if value is not None}
    if engines:
        said["url"] = [url for url in engines if url != EMBEDDED] or None
    document = {**settings.model_dump(exclude_unset=True), "engine": EngineSettings.model_validate(said)}
    return Settings.model_validate(document)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _show(finding: Finding) -> None:
    from polar.cli.output import visible

    sign, colour = _SIGNS[finding.level]
    typer.secho(f"{sign} ", fg=colour, nl=False)
    typer.echo(f"{finding.area}: {finding.name}: {visible(finding.detail)}")
    if finding.fix:
        typer.echo(f"    → {visible(finding.fix)}")
