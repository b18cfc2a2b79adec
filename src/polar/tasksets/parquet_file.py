"""Parquet files written one row group at a time, to limit memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from polar.errors import PolarError
from polar.files import atomic_file, make_directory

ROWS_PER_GROUP = 4096
TOKENS_PER_GROUP = 1 << 20
"""A row group is written when either limit is reached, which keeps memory at about 30 MB."""


@contextmanager
def parquet_files(directory: Path, schemas: Mapping[str, pa.Schema]) -> Iterator[dict[str, ParquetFile]]:
    """Yield files by name to add rows to; they appear in the directory if the block ends without an error."""
    make_directory(directory)
    try:
        with ExitStack() as stack:
            files = {}
            for name, schema in schemas.items():
                part = stack.enter_context(atomic_file(directory / f"{name}.parquet"))
                writer = stack.enter_context(pq.ParquetWriter(part, schema, compression="zstd"))
                files[name] = ParquetFile(writer, schema)
            yield files
            for file in files.values():
                file.flush()
    except OSError as error:
        raise PolarError(f"{directory}: cannot be written: {error.strerror or error}") from error


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
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()
            self._tokens = 0


def json_text(value: Any) -> str:
    """Encode a cell whose keys vary from row to row."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
