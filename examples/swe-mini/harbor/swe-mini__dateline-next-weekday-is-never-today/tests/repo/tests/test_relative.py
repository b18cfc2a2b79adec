import datetime
import unittest

from dateline import parse

WEDNESDAY = datetime.date(2024, 5, 15)
FRIDAY = datetime.date(2024, 5, 17)


class RelativeTest(unittest.TestCase):
    def test_tomorrow(self):
        self.assertEqual(parse("Tomorrow", WEDNESDAY), datetime.date(2024, 5, 16))

    def test_weeks_ago(self):
        self.assertEqual(parse("2 weeks ago", WEDNESDAY), datetime.date(2024, 5, 1))

    def test_next_friday(self):
        self.assertEqual(parse("next friday", WEDNESDAY), datetime.date(2024, 5, 17))

    def test_last_friday(self):
        self.assertEqual(parse("last friday", WEDNESDAY), datetime.date(2024, 5, 10))

    def test_next_friday_on_a_friday(self):
        self.assertEqual(parse("next friday", FRIDAY), datetime.date(2024, 5, 24))

    def test_last_friday_on_a_friday(self):
        self.assertEqual(parse("last friday", FRIDAY), datetime.date(2024, 5, 10))

    def test_every_weekday_is_one_to_seven_days_away(self):
        for name in ("monday", "wednesday", "sunday"):
            for offset in range(7):
                today = WEDNESDAY + datetime.timedelta(days=offset)
                self.assertIn((parse(f"next {name}", today) - today).days, range(1, 8))
                self.assertIn((today - parse(f"last {name}", today)).days, range(1, 8))
