"""A parquet file written a row group at a time, so that what is held in memory stays small."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar.errors import InvalidInput
from polar.files import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_PER_GROUP = 4096
TOKENS_PER_GROUP = 1 << 20
"""A row group is written when either is reached: what is held in memory stays at some 30 MB."""


def make_directory(directory: Path) -> None:
    """Make a directory for files; InvalidInput if they could not be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise InvalidInput(f"{directory}: is a file, not a directory") from None
    except OSError as error:
        raise InvalidInput(f"{directory}: cannot be written: {error.strerror}") from None


@contextmanager
def parquet_file(path: Path, schema: pa.Schema) -> Iterator[ParquetFile]:
    """A file to add rows to, which is at `path` when the body ends without an error."""
    import pyarrow.parquet as pq

    with atomic_file(path) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        file = ParquetFile(writer, schema)
        yield file
        file.flush()


class ParquetFile:
    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self.count = 0
        self._tokens = 0

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self.count += 1
        self._tokens += tokens
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens >= TOKENS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()
        self._tokens = 0
