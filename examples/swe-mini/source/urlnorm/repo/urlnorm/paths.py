"""Paths without `.` and `..`."""


def remove_dot_segments(path):
    """What RFC 3986, section 5.2.4 makes of a path; nothing leads above the root."""
    output = []
    segments = path.split("/")
    for position, segment in enumerate(segments):
        is_last = position == len(segments) - 1
        if segment == "..":
            if output:
                output.pop()
            if is_last:
                output.append("")
        elif segment == ".":
            if is_last:
                output.append("")
        else:
            output.append(segment)
    return "/".join(output)
