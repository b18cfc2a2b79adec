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

    def test_write_quotes(self):
        self.assertEqual(format_row(['say "hi"']), '"say ""hi"""')

    def test_what_is_written_is_read_back(self):
        for row in (['"', '""'], ['a"b,c', " x "], ["", '"quoted"']):
            self.assertEqual(split_line(format_row(row)), row)
