"""Fields into lines."""


def format_row(fields, separator=","):
    """One line without its end, quoted where it must be."""
    return separator.join(format_field(str(field), separator) for field in fields)


def format_field(text, separator):
    if needs_quotes(text, separator):
        return f'"{text}"'
    return text


def needs_quotes(text, separator):
    return any(char in text for char in (separator, '"', "\n", "\r")) or text != text.strip()
