"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polar.errors import InvalidInput


def command_group(*, no_args_is_help: bool = False) -> typer.Typer:
    """A command that has sub-commands, with the plain help that all commands have."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=no_args_is_help)


def token_in(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        token = Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidInput(f"--token-file {file}: cannot be read: {reason}") from None
    if not token.strip():
        raise InvalidInput(f"--token-file {file}: there is no token in it")
    return token.strip()


Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="The rollout server. Default: $POLAR_SERVER, else the one of this directory's settings.",
    ),
]
RunningServer = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="A running `polar serve`; without it one is started for this run, with its data in DIR.",
    ),
]
# Never the token itself: everyone on a machine can read the command lines of its processes.
Token = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="A file with its bearer token. Default: $POLAR_TOKEN, else the one kept in the data directory.",
        callback=token_in,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML settings, - for standard input (default: ./polar.yaml if there)."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Where state lives (default: .polar).")]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else: one document, or one object a line for lists."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="console|json",
        help="Log lines for people, or an object a line (default: $POLAR_LOG_FORMAT, else console).",
    ),
]
ExitWithParent = Annotated[bool, typer.Option("--exit-with-parent", hidden=True)]

Model = Annotated[str | None, typer.Option(help="Default model, a directory, or a Hugging Face model id.")]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Weights or a LoRA adapter to sample with instead of the model's own, as a training run's"
        " checkpoint holds them in `weights`.",
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
        help="A running vLLM, SGLang, `polar engine` or OpenAI-compatible endpoint, repeated for replicas;"
        " without it one is started.",
    ),
]
EngineKind = Annotated[
    str | None,
    typer.Option(
        metavar="vllm|sglang|openai|embedded",
        help="What the engine is. vllm (without a URL it is started here) and sglang give token ids; openai"
        " is any OpenAI-compatible endpoint (text only: recorded, never trainable; name its --model, and put"
        " its key in $POLAR_ENGINE_KEY). Default: vllm with a URL, else embedded.",
    ),
]
EngineMode = Annotated[
    str | None,
    typer.Option(
        metavar="auto|tokens|chat",
        help="Who renders prompts. tokens: Polar, exactly, never a token twice. chat: the engine, for models"
        " Polar has no renderer for. auto (default): tokens where it can, else chat.",
    ),
]
RunSlots = Annotated[
    int | None, typer.Option(help="Agents that run at once on each node (default: what the machine carries).")
]
NodeCount = Annotated[
    int | None, typer.Option(help="Nodes to run here, each with its own gateway (default: 1).")
]
Ca = Annotated[
    Path | None, typer.Option(help="Who signed the server's certificate, in PEM (default: $POLAR_CA).")
]

Tasksets = Annotated[
    list[Path],
    typer.Option(
        "--taskset",
        "-t",
        metavar="PATH",
        help="A taskset.yaml, a task file, rows (JSONL, parquet), or a directory of Harbor tasks or of"
        " these; may be given several times.",
    ),
]
Harness = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:{OPTIONS}]", help="The harness of every task, instead of the one that it names."
    ),
]
Samples = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Attempts at every task, instead of what it says.")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Agents that run at once.")]
PassReward = Annotated[float, typer.Option(help="Minimum reward for a session to pass.")]


def overlay(harness: str | None, samples: int | None = None) -> dict[str, Any]:
    """The fields that options lay over every task."""
    from polar.evals.plan import parse_harness

    component = parse_harness(harness).component if harness is not None else None
    given = {
        "harness": component and component.model_dump(mode="json"),
        "samples": samples,
    }
    return {name: value for name, value in given.items() if value is not None}
