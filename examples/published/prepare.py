"""Adds to SWE-Gym's table how its tests are run, which the official package does not know, and chooses rows.

    python examples/published/prepare.py SWE-Gym.parquet examples/published/tasks/swe-gym.parquet

`--only FILE` keeps the rows whose ids the file lists, one a line. `--report FILE`, the report.json of an
evaluation of all rows with the untrained policy, keeps those that it sometimes passes: where all samples of
a task are alike, nothing is learned from it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polar.evals.report import Report, load_report

COMMAND = "source /opt/miniconda3/bin/activate testbed && python -m pytest -rA -p no:cacheprovider {files}"
"""Activates the environment of the dataset's images, where the repository is installed."""


def test_files(test_patch: str) -> list[str]:
    """Return the files that a patch of hidden tests adds or changes."""
    found = re.findall(r"^\+\+\+ b/(\S+)$", test_patch, re.MULTILINE)
    return [file for file in found if file.endswith(".py")]


def with_commands(table: pa.Table) -> pa.Table:
    """Return the rows whose tests are Python files, with their command and report format."""
    files = [test_files(patch) for patch in table["test_patch"].to_pylist()]
    table = table.append_column("test_cmd", pa.array([COMMAND.format(files=" ".join(one)) for one in files]))
    table = table.append_column("log_parser", pa.array(["pytest"] * len(files)))
    return table.filter(pa.array([bool(one) for one in files]))


def sometimes_passed(report: Report) -> set[str]:
    """Return the ids of tasks that some attempts passed and some did not."""
    tasks = [task for cell in report.cells for task in cell.tasks]
    return {task.id for task in tasks if 0 < task.passed(report.threshold) < len(task.counted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("into", type=Path)
    parser.add_argument("--only", type=Path, help="a file of the ids to keep, one a line")
    parser.add_argument("--report", type=Path, help="report.json of an evaluation of all rows")
    asked = parser.parse_args()
    table = with_commands(pq.read_table(asked.table))
    for wanted in (
        set(asked.only.read_text().split()) if asked.only else None,
        sometimes_passed(load_report(asked.report)) if asked.report else None,
    ):
        if wanted is not None:
            table = table.filter(pc.is_in(table["instance_id"], pa.array(sorted(wanted), pa.string())))
    pq.write_table(table, asked.into)
    print(f"{asked.into}: {table.num_rows} rows")


if __name__ == "__main__":
    main()
