"""Sets of numbers as sorted intervals that do not touch."""


def merge(spans):
    """The fewest intervals that cover the same numbers, in order; empty intervals vanish."""
    merged = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(spans, holes):
    """What of the intervals lies in no hole."""
    left = merge(spans)
    for hole_start, hole_end in merge(holes):
        remaining = []
        for start, end in left:
            if hole_end <= start or hole_start >= end:
                remaining.append((start, end))
                continue
            if start < hole_start:
                remaining.append((start, hole_start))
            elif end > hole_end:
                remaining.append((hole_end, end))
        left = remaining
    return left


def covered(spans):
    """How long the intervals are together, what they share counted once."""
    return sum(end - start for start, end in merge(spans))
