import datetime
import unittest

from dateline import parse

WEDNESDAY = datetime.date(2024, 5, 15)


class RelativeTest(unittest.TestCase):
    def test_tomorrow(self):
        self.assertEqual(parse("Tomorrow", WEDNESDAY), datetime.date(2024, 5, 16))

    def test_weeks_ago(self):
        self.assertEqual(parse("2 weeks ago", WEDNESDAY), datetime.date(2024, 5, 1))

    def test_next_friday(self):
        self.assertEqual(parse("next friday", WEDNESDAY), datetime.date(2024, 5, 17))

    def test_last_friday(self):
        self.assertEqual(parse("last friday", WEDNESDAY), datetime.date(2024, 5, 10))
