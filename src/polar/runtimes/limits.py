"""What a sandbox may use of its machine, and the words for having wanted more."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ByteSize, ConfigDict, Field

MIB = 1024 * 1024
GIB = 1024 * MIB


class Limit(StrEnum):
    """One thing that a sandbox can run out of."""

    CPU = "cpu"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"


class Limits(BaseModel):
    """Of one sandbox, all its processes together; None: as much as the machine has."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpus: float | None = Field(default=None, ge=0.01, le=4096)
    """How many cores' worth of time; None: an equal share with the other sandboxes."""
    memory: ByteSize | None = Field(default=ByteSize(8 * GIB), ge=16 * MIB)
    """Bytes, or a text such as "4GiB"; what is written to /dev/shm counts too."""
    pids: int | None = Field(default=2048, ge=8, le=4_194_304)
    """Processes and threads."""
    disk: ByteSize | None = Field(default=ByteSize(10 * GIB), ge=16 * MIB)
    """Everything the sandbox may write, in bytes or as a text."""
