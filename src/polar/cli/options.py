"""Options that several commands share, and the client they lead to."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.client import Client

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="The rollout server. Default: $POLAR_SERVER, else the one of this directory's settings.",
        rich_help_panel="Connection",
        show_default=False,
    ),
]


def _token_in(file: str | None) -> str | None:
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


# Never the token itself: everyone on a machine can read the command lines of its processes.
Token = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="A file with its bearer token. Default: $POLAR_TOKEN, else the one kept in the data directory.",
        callback=_token_in,
        rich_help_panel="Connection",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML settings, - for standard input (default: ./polar.yaml if there)."
    ),
]
Model = Annotated[str | None, typer.Option(help="Default model, a directory, or a Hugging Face model id.")]
DataDir = Annotated[Path | None, typer.Option(help="Where state lives (default: .polar).")]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else: one document, or one object a line for lists."),
]

EngineKind = Annotated[
    str | None,
    typer.Option(
        "--engine-kind",
        metavar="vllm|sglang|openai",
        help="What the engine speaks. vllm (default) and sglang give token ids; openai is any"
        " OpenAI-compatible endpoint (text only: recorded, never trainable; name its --model,"
        " and put its key in $POLAR_ENGINE_KEY).",
        show_default=False,
    ),
]
EngineMode = Annotated[
    str | None,
    typer.Option(
        "--engine-mode",
        metavar="auto|tokens|chat",
        help="Who renders prompts. tokens: Polar, exactly, never a token twice. chat: the engine, for models"
        " Polar has no renderer for. auto (default): tokens where it can, else chat.",
        show_default=False,
    ),
]

LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="console|json",
        help="Log lines for people, or an object a line (default: $POLAR_LOG_FORMAT, else console).",
        show_default=False,
    ),
]

Case = TypeVar("Case", bound=StrEnum)


def command_group(*, no_args_is_help: bool = False) -> typer.Typer:
    """A command that has sub-commands, with the plain help that all commands have."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=no_args_is_help)


def connect(server: str | None, token: str | None) -> Client:
    from polar.client import Client

    return Client(server, token)


def one_of(cases: type[Case], value: str | None, option: str) -> Case | None:
    """The enum's case that an option names; checked here so that `--help` need not import the enum."""
    if value is None:
        return None
    try:
        return cases(value)
    except ValueError:
        raise InvalidInput(f"{option}: {value!r} is none of {', '.join(cases)}") from None


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds(text: str, option: str) -> float:
    """`90s`, `15m`, `12h`, `30d`; a bare number is seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if match is None:
        raise InvalidInput(f"{option}: {text!r} is no length of time", hint="90s, 15m, 12h or 30d")
    return float(match[1]) * _UNITS[match[2] or "s"]
