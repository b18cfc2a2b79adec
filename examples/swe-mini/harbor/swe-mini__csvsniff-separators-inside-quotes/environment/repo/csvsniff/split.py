"""Lines into fields."""

QUOTE = '"'


def split_line(line, separator=","):
    """The fields of one line; a quote inside a quoted field is written twice."""
    fields, current, quoted = [], [], False
    index = 0
    while index < len(line):
        char = line[index]
        if char == QUOTE and quoted and line[index + 1 : index + 2] == QUOTE:
            current.append(QUOTE)
            index += 1
        elif char == QUOTE:
            quoted = not quoted
        elif char == separator and not quoted:
            fields.append("".join(current))
            current = []
        else:
            current.append(char)
        index += 1
    if quoted:
        raise ValueError("a quoted field does not end")
    return [*fields, "".join(current)]


def read(text, separator=","):
    """All rows of a text without line breaks inside fields."""
    return [split_line(line, separator) for line in text.splitlines() if line]
