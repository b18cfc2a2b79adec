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

    def test_short_year_of_last_century(self):
        self.assertEqual(parse_absolute("1.4.85"), datetime.date(1985, 4, 1))
        self.assertEqual(parse_absolute("1 Apr 99"), datetime.date(1999, 4, 1))

    def test_short_years_around_the_pivot(self):
        self.assertEqual(parse_absolute("1.1.69"), datetime.date(2069, 1, 1))
        self.assertEqual(parse_absolute("1.1.70"), datetime.date(1970, 1, 1))
        self.assertEqual(parse_absolute("1.1.00"), datetime.date(2000, 1, 1))

    def test_old_full_year(self):
        self.assertEqual(parse_absolute("1.1.1901"), datetime.date(1901, 1, 1))

    def test_nonsense(self):
        with self.assertRaises(ValueError):
            parse_absolute("the day after the party")
