"""`polar show FILE` tells a session's story: outcome, messages, tokens, masks, logprobs, traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from polar.cli.main import app
from polar.cli.show import Colour, find_tokenizer, page, trained_masks
from polar.engines.vocabulary import pieces
from polar.errors import InvalidInput
from polar.recordings.recording import Recording
from tests.fakes.recordings import CALL, encoded, recording, tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "session.rec"
    path.write_bytes(encoded(recording()))
    return path


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    tokenizer().save(str(path))
    return path


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())
    return result.stdout


def coloured(made: Recording, colour: Colour) -> str:
    console = Console(force_terminal=True, color_system="standard", width=100, _environ={})
    with console.capture() as capture:
        for part in page(made, tokenizer(), colour=colour, full=False, ids=False):
            console.print(part)
    return capture.get()


def test_the_page_has_outcome_conversation_and_traces(file: Path, vocabulary: Path) -> None:
    text = shown(file, "--tokenizer", vocabulary)
    for line in (
        "SESSION         s1",
        "task            hello-file, sample 0, attempt 1",
        "reward          1 (exists 0.3, right 0.7)",
        "agent           exited, exit code 0",
        "tokens          32 sampled = 21 trainable + 11 excluded (11 cancelled)",
        "policy version  3–4",
        "seconds         init 0.5 · ready 0.0 · running 3.2 · postrun 0.0",
        "  looks [bold]right",
        "  tools offered: bash, write",
        "    Run this command: echo hello > hello.txt",
        "    I will run it.<|im_end|>",
        "    Done, café 😀<|im_end|>",
        "recorded        3 model calls, 2 traces (2 main)",
        "continued       1 clean",
        "TRACE  PROMPT  RESPONSE  TRAINABLE  MEAN LOGPROB  VERSION  REWARD  LINEAGE  FROM  COMPLETIONS",
        "    0       3         6          6        -2.005        3       1  main        -  c0",
        "    1      11        15         15        -2.005        4       1  main        -  c1",
    ):
        assert line in text.splitlines(), line


def test_a_completion_shows_only_what_is_new_since_its_parent(file: Path, vocabulary: Path) -> None:
    text = shown(file, "--tokenizer", vocabulary)
    assert text.count("Run this command") == 1
    second = text.split("[1] c1")[1].split("[2] c2")[0]
    assert "exit code 0" in second
    assert "I will run it" not in second


def test_long_messages_are_folded_unless_asked_for(file: Path) -> None:
    folded, full = shown(file), shown(file, "--full")
    assert "rule 5" in folded
    assert "rule 6" not in folded
    assert "more characters (--full shows all)" in folded
    assert "rule 39" in full
    assert "--full" not in full


def test_without_a_tokenizer_the_parsed_message_is_shown(file: Path) -> None:
    text = shown(file)
    assert f"    → bash({CALL.tool_calls[0].arguments})" in text.splitlines()
    assert "(no tokenizer here: this is the parsed message)" in text


def test_ids_show_every_sampled_token_with_logprob_mask_and_version(file: Path, vocabulary: Path) -> None:
    text = shown(file, "--tokenizer", vocabulary.parent, "--ids")
    rows = [line.split(maxsplit=5) for line in text.split("[0] c0")[1].split("[1] c1")[0].splitlines()]
    table = [row for row in rows if len(row) == 6 and row[0].isdigit() and row[1].isdigit()]
    first = recording().completions[0]
    assert [int(row[1]) for row in table] == first.sampled_ids.tolist()
    assert np.allclose([float(row[2]) for row in table], first.logprobs, atol=1e-4)
    assert {(row[3], row[4]) for row in table} == {("1", "3")}
    assert "".join(row[5].strip("'") for row in table) == "I will run it.<|im_end|>"


def test_what_a_model_says_cannot_drive_the_terminal(file: Path, vocabulary: Path) -> None:
    assert "A title␛[2J" in shown(file)
    assert "A title␛[2J" in shown(file, "--tokenizer", vocabulary)


def test_a_cancelled_call_is_shown_as_not_trained(file: Path) -> None:
    assert "11 sampled · 0 trained" in shown(file).split("[2] c2")[1]


def test_colours_tell_logprob_mask_or_version() -> None:
    made = recording()
    green, red, dim = "\x1b[32m", "\x1b[31m", "\x1b[2m"
    by_logprob = coloured(made, Colour.LOGPROB)
    assert f"{green}I\x1b[0m" in by_logprob
    assert f"{red} it.<|im_end|>" in by_logprob
    by_mask = coloured(made, Colour.MASK)
    assert f"{green}I will run it.<|im_end|>" in by_mask
    assert f"{dim}A title␛[2J<|im_end|>" in by_mask
    by_version = coloured(made, Colour.VERSION)
    assert "version 3" in by_version
    assert "version 4" in by_version
    assert f"{green}I will" not in by_version
    assert (
        "\x1b[3" not in coloured(made, Colour.NONE).split("assistant")[1].split("[1] c1")[0].split("m", 1)[1]
    )


def test_masks_are_those_of_the_traces() -> None:
    made = recording()
    masks = trained_masks(made)
    assert sum(int(mask.sum()) for mask in masks.values()) == made.trajectory.stats.trainable_tokens
    assert not masks["c2"].any()


def test_json_has_everything(file: Path) -> None:
    document = json.loads(shown(file, "--json"))
    made = recording()
    assert document["result"]["session_id"] == "s1"
    assert [c["sampled_ids"] for c in document["completions"]] == [
        c.sampled_ids.tolist() for c in made.completions
    ]
    assert document["completions"][1]["messages"][2]["tool_calls"][0]["name"] == "bash"
    assert sum(sum(trace["loss_mask"]) for trace in document["traces"]) == 21


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    path.write_text("something else")
    result = CliRunner().invoke(app, ["show", str(path)])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert f"{path}: not a Polar recording" in result.stderr


def test_each_token_has_the_text_it_adds() -> None:
    vocabulary = tokenizer()
    ids = vocabulary.encode("Done, café 😀!").ids
    texts = pieces(vocabulary, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == "Done, café 😀!"
    emoji = vocabulary.encode("😀").ids
    assert pieces(vocabulary, emoji[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"
    assert pieces(vocabulary, []) == []
    assert len(pieces(vocabulary, [*ids, 10**6])) == len(ids) + 1


def test_a_tokenizer_is_found_without_a_download(vocabulary: Path, tmp_path: Path) -> None:
    assert find_tokenizer(str(vocabulary.parent)) is not None
    assert find_tokenizer("no-such-model") is None
    assert find_tokenizer(None) is None
    with pytest.raises(InvalidInput, match="--tokenizer"):
        find_tokenizer(None, tmp_path / "absent")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InvalidInput, match="not a tokenizer"):
        find_tokenizer(None, tmp_path / "broken.json")
