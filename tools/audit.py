"""Checks every pinned package against the public databases of known vulnerabilities.

    python3 -m tools.audit

Fails if a vulnerability is known. If no database can be reached, it says that nothing was checked and does
not fail, so that a machine without a network can go on. Whether a database answers is tested with a release
that is long known to be vulnerable.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.isolated import NotAnswered, install_isolated

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
AUDITOR = "pip-audit==2.10.1"
SOURCES = ("pypi", "osv")
KNOWN_BAD = "jinja2==2.10"
SECONDS = 300


def main() -> int:
    try:
        auditor = auditor_program()
    except NotAnswered as error:
        return report_skipped([str(error)])
    reasons = []
    for source in SOURCES:
        try:
            check_source(auditor, source)
            return report(look_up(auditor, source, CONSTRAINTS), source)
        except NotAnswered as error:
            reasons.append(f"{source}: {error}")
    return report_skipped(reasons)


def auditor_program() -> Path:
    return install_isolated(AUDITOR) / "pip-audit"


def check_source(auditor: Path, source: str) -> None:
    """Raise NotAnswered unless the database knows a vulnerability that it must know."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(KNOWN_BAD + "\n")
        file.flush()
        if not vulnerable(look_up(auditor, source, Path(file.name))):
            raise NotAnswered(f"does not know the vulnerabilities of {KNOWN_BAD}")


def look_up(auditor: Path, source: str, requirements: Path) -> list[dict[str, Any]]:
    """Return what a database knows about each release."""
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
        raise NotAnswered("timed out") from None
    except (ValueError, KeyError):
        last = found.stderr.strip().splitlines()
        raise NotAnswered(last[-1].partition(":")[0] if last else "no answer") from None
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
        print(f"unknown to the database: {', '.join(unknown)}")
    checked = len(dependencies) - len(unknown)
    print(f"audit: {checked} packages checked ({source}), {len(bad)} with known vulnerabilities")
    return 1 if bad else 0


def report_skipped(reasons: list[str]) -> int:
    print("skipped: make audit checked nothing, because no vulnerability database can be reached")
    for reason in reasons:
        print(f"  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
