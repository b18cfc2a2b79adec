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
