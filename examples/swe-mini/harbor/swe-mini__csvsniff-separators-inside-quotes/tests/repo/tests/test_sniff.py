import unittest

from csvsniff import sniff


class SniffTest(unittest.TestCase):
    def test_comma(self):
        self.assertEqual(sniff("a,b,c\n1,2,3\n"), ",")

    def test_semicolon_with_decimal_commas(self):
        self.assertEqual(sniff("name;price;vat\nx;1,50;0\ny;2;0,10\n"), ";")

    def test_tab(self):
        self.assertEqual(sniff("a\tb\n1\t2\n"), "\t")

    def test_nothing(self):
        with self.assertRaises(ValueError):
            sniff("\n\n")

    def test_separators_inside_quotes_do_not_count(self):
        self.assertEqual(sniff('id;note\n1;"a, b"\n2;"x; y; z"\n3;plain\n'), ";")

    def test_other_separators_inside_quotes_do_not_count(self):
        self.assertEqual(sniff('"a,b,c"|x\n"d,e,f"|y\n'), "|")

    def test_a_doubled_quote_does_not_end_a_field(self):
        self.assertEqual(sniff('1;"say ""a;b"" now"\n2;"x"\n'), ";")
