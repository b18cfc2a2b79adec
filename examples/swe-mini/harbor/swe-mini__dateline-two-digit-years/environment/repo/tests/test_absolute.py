import datetime
import unittest

from dateline import parse_absolute


class AbsoluteTest(unittest.TestCase):
    def test_iso(self):
        self.assertEqual(parse_absolute("2024-02-29"), datetime.date(2024, 2, 29))

    def test_day_first(self):
        self.assertEqual(parse_absolute("29 February 2024"), datetime.date(2024, 2, 29))

    def test_month_first(self):
        self.assertEqual(parse_absolute("Feb 29, 2024"), datetime.date(2024, 2, 29))

    def test_short_year(self):
        self.assertEqual(parse_absolute("29.2.24"), datetime.date(2024, 2, 29))

    def test_nonsense(self):
        with self.assertRaises(ValueError):
            parse_absolute("the day after the party")
