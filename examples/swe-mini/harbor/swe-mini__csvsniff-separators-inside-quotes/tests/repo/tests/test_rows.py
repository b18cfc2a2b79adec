import unittest

from csvsniff import format_row, read, split_line


class RowsTest(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(split_line("a,b,,d"), ["a", "b", "", "d"])

    def test_quoted(self):
        self.assertEqual(split_line('"a,b","say ""hi"""'), ["a,b", 'say "hi"'])

    def test_read(self):
        self.assertEqual(read("a;b\n1;2\n", ";"), [["a", "b"], ["1", "2"]])

    def test_write_plain(self):
        self.assertEqual(format_row(["a", 1, ""]), "a,1,")

    def test_write_separator(self):
        self.assertEqual(format_row(["a,b", "c"]), '"a,b",c')
