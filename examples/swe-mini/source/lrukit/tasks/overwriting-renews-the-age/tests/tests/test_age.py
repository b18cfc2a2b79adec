import unittest

from lrukit import Cache


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class AgeTest(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.cache = Cache(2, ttl=60, clock=self.clock)

    def test_lives_to_its_age(self):
        self.cache.set("token", "old")
        self.clock.now = 59
        self.assertEqual(self.cache.get("token"), "old")
        self.clock.now = 60
        self.assertIsNone(self.cache.get("token"))

    def test_overwriting_renews_the_age(self):
        self.cache.set("token", "old")
        self.clock.now = 50
        self.cache.set("token", "new")
        self.clock.now = 109
        self.assertEqual(self.cache.get("token"), "new")
        self.clock.now = 110
        self.assertIsNone(self.cache.get("token"))

    def test_writing_after_expiry_renews_the_age(self):
        self.cache.set("token", "old")
        self.clock.now = 100
        self.cache.set("token", "new")
        self.clock.now = 150
        self.assertEqual(self.cache.get("token"), "new")

    def test_the_other_key_keeps_its_age(self):
        self.cache.set("a", 1)
        self.clock.now = 30
        self.cache.set("b", 2)
        self.clock.now = 60
        self.assertNotIn("a", self.cache)
        self.assertIn("b", self.cache)
