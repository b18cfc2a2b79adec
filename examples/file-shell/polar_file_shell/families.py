"""The families of tasks, each of which draws puzzles that need only a few tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from polar_file_shell.draw import Draw
from polar_file_shell.puzzle import (
    Puzzle,
    bash,
    edit,
    holds,
    holds_json,
    is_directory,
    is_gone,
    is_script,
    read,
    write,
)


class Family(Protocol):
    """Makes a puzzle from random draws."""

    __name__: str

    def __call__(self, draw: Draw) -> Puzzle: ...


def text(lines: Iterable[object]) -> str:
    return "".join(f"{line}\n" for line in lines)


def write_text(draw: Draw) -> Puzzle:
    file, words = draw.file(), " ".join(draw.nouns(draw.number(2, 4)))
    ask = draw.one(
        f"Write the text {words} to {file}.",
        f"Create a file {file} that says: {words}",
        f"Put these words into {file}: {words}",
    )
    return Puzzle(ask, (holds(file, words),), (write(file, words), bash(f"echo '{words}' > {file}")))


def append_line(draw: Draw) -> Puzzle:
    file, lines, new = draw.file(), draw.nouns(3), draw.noun()
    ask = draw.one(
        f"Add the line {new} at the end of {file}.",
        f"Append {new} to {file}.",
    )
    return Puzzle(
        ask, (holds(file, text([*lines, new])),), (bash(f"echo {new} >> {file}"),), {file: text(lines)}
    )


def copy_file(draw: Draw) -> Puzzle:
    old, new, lines = draw.file(), draw.file(), text(draw.nouns(3))
    ask = draw.one(f"Copy {old} to {new}.", f"Make a copy of {old} called {new}.")
    return Puzzle(ask, (holds(old, lines), holds(new, lines)), (bash(f"cp {old} {new}"),), {old: lines})


def rename_file(draw: Draw) -> Puzzle:
    old, new, lines = draw.file(), draw.file(), text(draw.nouns(3))
    ask = draw.one(f"Rename {old} to {new}.", f"Give {old} the new name {new}.")
    return Puzzle(ask, (is_gone(old), holds(new, lines)), (bash(f"mv {old} {new}"),), {old: lines})


def delete_file(draw: Draw) -> Puzzle:
    gone, kept = draw.file(), draw.file()
    lines, others = text(draw.nouns(2)), text(draw.nouns(2))
    ask = draw.one(f"Delete {gone} but keep {kept}.", f"Remove the file {gone}. Do not touch {kept}.")
    return Puzzle(
        ask, (is_gone(gone), holds(kept, others)), (bash(f"rm {gone}"),), {gone: lines, kept: others}
    )


def join_files(draw: Draw) -> Puzzle:
    first, second, joined = draw.file(), draw.file(), draw.file()
    one, two = text(draw.nouns(2)), text(draw.nouns(2))
    ask = draw.one(
        f"Join {first} and {second} into {joined}, in this order.",
        f"Write {first} followed by {second} to {joined}.",
    )
    return Puzzle(
        ask,
        (holds(joined, one + two),),
        (bash(f"cat {first} {second} > {joined}"),),
        {first: one, second: two},
    )


def sort_lines(draw: Draw) -> Puzzle:
    file, out, words = draw.file(), draw.file(), draw.nouns(5)
    ask = draw.one(
        f"Sort the lines of {file} and write them to {out}.", f"Write the lines of {file} in order to {out}."
    )
    commands = (f"sort {file} > {out}", f"sort -o {out} {file}")
    return Puzzle(ask, (holds(out, text(sorted(words))),), tuple(map(bash, commands)), {file: text(words)})


def sort_backwards(draw: Draw) -> Puzzle:
    file, out, words = draw.file(), draw.file(), draw.nouns(5)
    ask = draw.one(
        f"Sort the lines of {file} in reverse order and write them to {out}.",
        f"Write the lines of {file} from z to a to {out}.",
    )
    expected = text(sorted(words, reverse=True))
    return Puzzle(ask, (holds(out, expected),), (bash(f"sort -r {file} > {out}"),), {file: text(words)})


def sort_numbers(draw: Draw) -> Puzzle:
    file, out, numbers = draw.file(), draw.file(), draw.numbers(5, 300)
    ask = draw.one(
        f"Sort the numbers in {file} from small to large into {out}.",
        f"Write the numbers of {file} to {out}, smallest first.",
    )
    expected = text(sorted(numbers))
    return Puzzle(ask, (holds(out, expected),), (bash(f"sort -n {file} > {out}"),), {file: text(numbers)})


def largest_number(draw: Draw) -> Puzzle:
    file, out, numbers = draw.file(), draw.file(), draw.numbers(6, 300)
    ask = draw.one(
        f"Write the largest number in {file} to {out}.",
        f"Find the biggest number of {file}; save it in {out}.",
    )
    command = f"sort -n {file} | tail -n 1 > {out}"
    return Puzzle(ask, (holds(out, str(max(numbers))),), (bash(command),), {file: text(numbers)})


def distinct_lines(draw: Draw) -> Puzzle:
    file, out, words = draw.file(), draw.file(), draw.nouns(3)
    lines = draw.shuffled([*words, *words[:2]])
    ask = draw.one(
        f"Write the different lines of {file}, sorted, to {out}.",
        f"Sort {file} without duplicates into {out}.",
    )
    commands = (f"sort -u {file} > {out}", f"sort {file} | uniq > {out}")
    return Puzzle(ask, (holds(out, text(sorted(words))),), tuple(map(bash, commands)), {file: text(lines)})


def count_lines(draw: Draw) -> Puzzle:
    file, out, words = draw.file(), draw.file(), draw.nouns(draw.number(3, 9))
    ask = draw.one(
        f"Write the number of lines of {file} to {out}.",
        f"Count the lines of {file}. Save the count in {out}.",
    )
    return Puzzle(
        ask, (holds(out, str(len(words))),), (bash(f"wc -l < {file} > {out}"),), {file: text(words)}
    )


def count_words(draw: Draw) -> Puzzle:
    file, out, words = draw.file(), draw.file(), draw.nouns(draw.number(5, 12))
    ask = draw.one(
        f"Write the number of words of {file} to {out}.",
        f"Count the words of {file}. Save the count in {out}.",
    )
    lines = text([" ".join(words[:3]), " ".join(words[3:])])
    return Puzzle(ask, (holds(out, str(len(words))),), (bash(f"wc -w < {file} > {out}"),), {file: lines})


def sum_numbers(draw: Draw) -> Puzzle:
    file, out, numbers = draw.file(), draw.file(), draw.numbers(draw.number(3, 6))
    ask = draw.one(
        f"Add up the numbers in {file} and write the sum to {out}.", f"Write the sum of {file} to {out}."
    )
    command = f"awk '{{s += $1}} END {{print s}}' {file} > {out}"
    return Puzzle(ask, (holds(out, str(sum(numbers))),), (bash(command),), {file: text(numbers)})


def take_column(draw: Draw) -> Puzzle:
    file, out, column = draw.file("csv"), draw.file(), draw.number(1, 3)
    rows = [(draw.person(), draw.noun(), draw.number(10, 99)) for _ in range(4)]
    ordinal = {1: "first", 2: "second", 3: "third"}[column]
    ask = draw.one(
        f"Write the {ordinal} column of {file} to {out}.", f"Save column {column} of {file} in {out}."
    )
    expected = text(row[column - 1] for row in rows)
    commands = (f"cut -d, -f{column} {file} > {out}", f"awk -F, '{{print ${column}}}' {file} > {out}")
    lines = text(",".join(map(str, row)) for row in rows)
    return Puzzle(ask, (holds(out, expected),), tuple(map(bash, commands)), {file: lines})


def first_lines(draw: Draw) -> Puzzle:
    file, out, words, count = draw.file(), draw.file(), draw.nouns(6), draw.number(2, 4)
    ask = draw.one(
        f"Write the first {count} lines of {file} to {out}.",
        f"Save the top {count} lines of {file} in {out}.",
    )
    command = f"head -n {count} {file} > {out}"
    return Puzzle(ask, (holds(out, text(words[:count])),), (bash(command),), {file: text(words)})


def one_line(draw: Draw) -> Puzzle:
    file, out, words, place = draw.file(), draw.file(), draw.nouns(4), draw.number(2, 3)
    ask = draw.one(f"Write line {place} of {file} to {out}.", f"Save only line {place} of {file} in {out}.")
    word = words[place - 1]
    solutions = (bash(f"sed -n {place}p {file} > {out}"), read(file) + write(out, word))
    return Puzzle(ask, (holds(out, word),), solutions, {file: text(words)})


def matching_lines(draw: Draw) -> Puzzle:
    file, out, word = draw.file(), draw.file(), draw.noun()
    matching = [f"{word} {other}" for other in draw.nouns(2)]
    lines = draw.shuffled([*matching, *(f"{draw.noun()} {draw.noun()}" for _ in range(3))])
    ask = draw.one(
        f"Write the lines of {file} that contain {word} to {out}.",
        f"Find the lines with {word} in {file} and save them in {out}.",
    )
    expected = text(line for line in lines if word in line)
    return Puzzle(ask, (holds(out, expected),), (bash(f"grep {word} {file} > {out}"),), {file: text(lines)})


def count_matching(draw: Draw) -> Puzzle:
    file, out, word, count = draw.file(), draw.file(), draw.noun(), draw.number(1, 4)
    lines = draw.shuffled([f"{word} {draw.noun()}" for _ in range(count)] + draw.nouns(3))
    matching = sum(word in line for line in lines)
    ask = draw.one(
        f"Count the lines of {file} that contain {word}. Write the number to {out}.",
        f"How many lines of {file} have {word} in them? Save the number in {out}.",
    )
    commands = (f"grep -c {word} {file} > {out}", f"grep {word} {file} | wc -l > {out}")
    return Puzzle(ask, (holds(out, str(matching)),), tuple(map(bash, commands)), {file: text(lines)})


def capitals(draw: Draw) -> Puzzle:
    file, out, lines = draw.file(), draw.file(), text(draw.nouns(3))
    ask = draw.one(
        f"Write {file} in capital letters to {out}.", f"Turn {file} into upper case and save it as {out}."
    )
    command = f"tr a-z A-Z < {file} > {out}"
    return Puzzle(ask, (holds(out, lines.upper()),), (bash(command),), {file: lines})


def replace_word(draw: Draw) -> Puzzle:
    file, old, new = draw.file(), draw.noun(), draw.noun()
    lines = text([f"{old} {draw.noun()}", draw.noun(), f"{draw.noun()} {old}"])
    ask = draw.one(
        f"Replace every {old} in {file} with {new}.", f"In {file}, change {old} to {new} everywhere."
    )
    command = f"sed -i 's/{old}/{new}/g' {file}"
    return Puzzle(ask, (holds(file, lines.replace(old, new)),), (bash(command),), {file: lines})


def change_setting(draw: Draw) -> Puzzle:
    file, key, old, new = draw.file("conf"), draw.noun(), draw.noun(), draw.noun()
    lines = text([f"{draw.noun()}={draw.noun()}", f"{key}={old}", f"{draw.noun()}={draw.noun()}"])
    ask = draw.one(
        f"In {file}, set {key} to {new}. It is {old} now.", f"Change {key} from {old} to {new} in {file}."
    )
    before, after = f"{key}={old}", f"{key}={new}"
    solutions = (edit(file, before, after), bash(f"sed -i 's/{before}/{after}/' {file}"))
    return Puzzle(ask, (holds(file, lines.replace(before, after)),), solutions, {file: lines})


def make_directory(draw: Draw) -> Puzzle:
    path = "/".join(draw.nouns(draw.number(1, 3)))
    ask = draw.one(f"Make the directory {path}.", f"Create a folder {path}.")
    return Puzzle(ask, (is_directory(path),), (bash(f"mkdir -p {path}"),))


def move_into_directory(draw: Draw) -> Puzzle:
    file, directory, lines = draw.file(), draw.noun(), text(draw.nouns(2))
    ask = draw.one(
        f"Make the directory {directory} and move {file} into it.",
        f"Move {file} into a new folder {directory}.",
    )
    solutions = (
        bash(f"mkdir {directory} && mv {file} {directory}/"),
        bash(f"mkdir {directory}") + bash(f"mv {file} {directory}/"),
    )
    return Puzzle(ask, (holds(f"{directory}/{file}", lines), is_gone(file)), solutions, {file: lines})


def json_file(draw: Draw) -> Puzzle:
    file, key, other = draw.file("json"), draw.noun(), draw.noun()
    value, count = draw.person(), draw.number(2, 90)
    ask = draw.one(
        f"Write a JSON object to {file}: {key} is {value}, {other} is {count}.",
        f"Make the JSON file {file} with {key} = {value} and {other} = {count}.",
    )
    content = f'{{"{key}": "{value}", "{other}": {count}}}'
    solutions = (write(file, content), bash(f"echo '{content}' > {file}"))
    return Puzzle(ask, (holds_json(file, content.replace(" ", "")),), solutions)


def run_script(draw: Draw) -> Puzzle:
    file, word = draw.file("sh"), draw.noun()
    ask = draw.one(
        f"Make an executable script {file} that prints {word}.",
        f"Write the shell script {file}. It prints {word} and can be run.",
    )
    content = f"#!/bin/sh\necho {word}\n"
    solutions = (
        write(file, content) + bash(f"chmod +x {file}"),
        bash(f"echo 'echo {word}' > {file} && chmod +x {file}"),
    )
    return Puzzle(ask, (is_script(file, word),), solutions)


def sort_and_cut(draw: Draw) -> Puzzle:
    file, out, words, count = draw.file(), draw.file(), draw.nouns(6), draw.number(2, 4)
    ask = f"Sort the lines of {file} and write the first {count} of them to {out}."
    command = f"sort {file} | head -n {count} > {out}"
    return Puzzle(ask, (holds(out, text(sorted(words)[:count])),), (bash(command),), {file: text(words)})


def matching_into_directory(draw: Draw) -> Puzzle:
    file, out, directory, word = draw.file(), draw.file(), draw.noun(), draw.noun()
    lines = draw.shuffled([f"{word} {draw.noun()}", f"{word} {draw.noun()}", *draw.nouns(3)])
    ask = f"Make the directory {directory} and write the lines of {file} with {word} to {directory}/{out}."
    command = f"mkdir {directory} && grep {word} {file} > {directory}/{out}"
    expected = text(line for line in lines if word in line)
    return Puzzle(ask, (holds(f"{directory}/{out}", expected),), (bash(command),), {file: text(lines)})


def _by_name(*families: Family) -> Mapping[str, Family]:
    return {family.__name__.replace("_", "-"): family for family in families}


FAMILIES = _by_name(
    write_text,
    append_line,
    copy_file,
    rename_file,
    delete_file,
    join_files,
    sort_lines,
    sort_backwards,
    sort_numbers,
    largest_number,
    distinct_lines,
    count_lines,
    count_words,
    sum_numbers,
    take_column,
    first_lines,
    one_line,
    matching_lines,
    count_matching,
    capitals,
    replace_word,
    change_setting,
    make_directory,
    move_into_directory,
    json_file,
    run_script,
)
HELD_OUT_ALONE = _by_name(sort_and_cut, matching_into_directory)
"""Compositions of the other families, never trained on."""
