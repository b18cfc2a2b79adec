"""CSV files of any separator."""

from csvsniff.sniff import sniff
from csvsniff.split import read, split_line
from csvsniff.write import format_row

__all__ = ["format_row", "read", "sniff", "split_line"]
