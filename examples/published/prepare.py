"""Adds to SWE-Gym's table how its tests are run, which the official package does not know.

python examples/published/prepare.py SWE-Gym.parquet examples/published/tasks/swe-gym.parquet
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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


def main() -> None:
    source, into = (Path(argument) for argument in sys.argv[1:3])
    table = with_commands(pq.read_table(source))
    pq.write_table(table, into)
    print(f"{into}: {table.num_rows} rows")


if __name__ == "__main__":
    main()
