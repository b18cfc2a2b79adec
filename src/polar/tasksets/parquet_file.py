"""A parquet file written a row group at a time, so that what is held in memory stays small."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from polar.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

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


class ParquetFile:
    """Written under a temporary name, renamed when complete."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self.count = 0
        self._tokens = 0

    def __enter__(self) -> Self:
        import pyarrow.parquet as pq

        descriptor, part = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        os.close(descriptor)
        self._part = Path(part)
        self._writer = pq.ParquetWriter(self._part, self._schema, compression="zstd")
        return self

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self.count += 1
        self._tokens += tokens
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens >= TOKENS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()
        self._tokens = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                self._part.chmod(0o644)
                os.replace(self._part, self._path)
        finally:
            self._part.unlink(missing_ok=True)
