"""Which character separates the fields."""

CANDIDATES = (",", ";", "\t", "|")


def sniff(text):
    """The separator that stands equally often in every line, the most frequent such one."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("there is nothing to look at")
    best, best_count = ",", 0
    for candidate in CANDIDATES:
        counts = {count(line, candidate) for line in lines}
        if len(counts) == 1 and (number := counts.pop()) > best_count:
            best, best_count = candidate, number
    return best


def count(line, separator):
    """How often the separator stands in a line."""
    return line.count(separator)
