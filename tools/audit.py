"""Looks every pinned package up in the public databases of known vulnerabilities.

    python3 -m tools.audit

Fails if one is known. Where no database can be asked, it says so, says that nothing was checked, and
does not fail: a machine without the network is no reason to stop. That a database answers at all is seen
by asking it about a release that is long known to be vulnerable.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.isolated import NotAnswered, isolated

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
AUDITOR = "pip-audit==2.10.1"
SOURCES = ("pypi", "osv")
KNOWN_BAD = "jinja2==2.10"
SECONDS = 300


def main() -> int:
    try:
        auditor = installed()
    except NotAnswered as error:
        return skipped([str(error)])
    reasons = []
    for source in SOURCES:
        try:
            check_source(auditor, source)
            return report(look_up(auditor, source, CONSTRAINTS), source)
        except NotAnswered as error:
            reasons.append(f"{source}: {error}")
    return skipped(reasons)


def installed() -> Path:
    return isolated(AUDITOR) / "pip-audit"


def check_source(auditor: Path, source: str) -> None:
    """NotAnswered unless the database knows what it must know."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(KNOWN_BAD + "\n")
        file.flush()
        if not vulnerable(look_up(auditor, source, Path(file.name))):
            raise NotAnswered(f"it does not answer about {KNOWN_BAD}")


def look_up(auditor: Path, source: str, requirements: Path) -> list[dict[str, Any]]:
    """What a database says of each release."""
    command = [str(auditor), "-r", str(requirements), "--no-deps", "--disable-pip", "-s", source]
    try:
        found = subprocess.run(
            [*command, "-f", "json", "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        dependencies: list[dict[str, Any]] = json.loads(found.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        raise NotAnswered("it took too long") from None
    except (ValueError, KeyError):
        last = found.stderr.strip().splitlines()
        raise NotAnswered(last[-1].partition(":")[0] if last else "it said nothing") from None
    return dependencies


def vulnerable(dependencies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dependency for dependency in dependencies if dependency.get("vulns")]


def report(dependencies: list[dict[str, Any]], source: str) -> int:
    unknown = [dependency["name"] for dependency in dependencies if "skip_reason" in dependency]
    bad = vulnerable(dependencies)
    for dependency in bad:
        for known in dependency["vulns"]:
            fixed = ", ".join(known.get("fix_versions", [])) or "no release"
            print(f"{dependency['name']} {dependency['version']}: {known['id']}, fixed in {fixed}")
    if unknown:
        print(f"not known there: {', '.join(unknown)}")
    checked = len(dependencies) - len(unknown)
    print(f"audit: {checked} packages looked up ({source}), {len(bad)} with known vulnerabilities")
    return 1 if bad else 0


def skipped(reasons: list[str]) -> int:
    print("skipped: make audit checked nothing, because no database of vulnerabilities can be asked here")
    for reason in reasons:
        print(f"  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
