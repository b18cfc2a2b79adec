"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polar.errors import InvalidInput


def command_group(*, no_args_is_help: bool = False) -> typer.Typer:
    """Return a command with sub-commands, whose help is plain like that of all commands."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=no_args_is_help)


def token_in(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        token = Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InvalidInput(f"--token-file {file}: cannot be read: {reason}") from None
    if not token.strip():
        raise InvalidInput(f"--token-file {file}: is empty")
    return token.strip()


Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="URL of the rollout server. Default: $POLAR_SERVER, else from the settings of this directory.",
    ),
]
RunningServer = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="URL of a running `polar serve`. Default: start one for this run, with its data in DIR.",
    ),
]
# Never the token itself: every user of a machine can read the command lines of its processes.
Token = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the server's token. Default: $POLAR_TOKEN, else the one in the data directory.",
        callback=token_in,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Settings file in YAML; - is standard input (default: ./polar.yaml if it exists).",
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Directory for all state (default: .polar).")]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print only JSON: one document, or one object per line for lists."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="console|json",
        help="Format of log lines (default: $POLAR_LOG_FORMAT, else console).",
    ),
]
ExitWithParent = Annotated[bool, typer.Option("--exit-with-parent", hidden=True)]

Model = Annotated[
    str | None, typer.Option(help="The default model's name, a directory, or a Hugging Face model id.")
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Weights or a LoRA adapter to sample with instead of the model's own, such as `weights` of a"
        " training run's checkpoint.",
        exists=True,
        file_okay=False,
    ),
]
EngineUrl = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-url",
        "--engine",
        metavar="URL",
        help="URL of a running vLLM, SGLang, `polar engine` or OpenAI-compatible endpoint; repeat for"
        " replicas. Default: start an engine.",
    ),
]
EngineKind = Annotated[
    str | None,
    typer.Option(
        metavar="vllm|sglang|openai|embedded",
        help="Kind of engine. vllm (started here unless a URL is given) and sglang return token ids; openai"
        " is any OpenAI-compatible endpoint (text only: recorded, never trainable; set --model, and put"
        " its key in $POLAR_ENGINE_KEY). Default: vllm with a URL, or if it is installed and there is a GPU;"
        " else embedded.",
    ),
]
EngineMode = Annotated[
    str | None,
    typer.Option(
        metavar="auto|tokens|chat",
        help="Who renders prompts. tokens: Polar, exactly. chat: the engine, for models"
        " without a renderer. auto (default): tokens if possible, else chat.",
    ),
]
RunSlots = Annotated[
    int | None,
    typer.Option(help="Maximum number of agents per node (default: derived from cores and memory)."),
]
NodeCount = Annotated[
    int | None, typer.Option(help="Number of nodes to run here, each with its own gateway (default: 1).")
]
Ca = Annotated[
    Path | None,
    typer.Option(help="PEM file of the authority that signed the server's certificate (default: $POLAR_CA)."),
]

Tasksets = Annotated[
    list[Path],
    typer.Option(
        "--taskset",
        "-t",
        metavar="PATH",
        help="A taskset.yaml, a task file, rows (JSONL, parquet), or a directory of Harbor tasks or"
        " these; repeat for several.",
    ),
]
Harness = Annotated[
    str | None,
    typer.Option(metavar="NAME[:{OPTIONS}]", help="Harness for all tasks, instead of their own."),
]
Samples = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Number of attempts per task, instead of the task's own.")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Maximum number of agents running at once.")]
PassReward = Annotated[float, typer.Option(help="Minimum reward for a session to pass.")]


def overlay(harness: str | None, samples: int | None = None) -> dict[str, Any]:
    from polar.evals.plan import parse_harness

    component = parse_harness(harness).component if harness is not None else None
    given = {
        "harness": component and component.model_dump(mode="json"),
        "samples": samples,
    }
    return {name: value for name, value in given.items() if value is not None}
