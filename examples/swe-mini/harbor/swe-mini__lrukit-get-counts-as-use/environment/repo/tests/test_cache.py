import unittest

from lrukit import Cache


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class CacheTest(unittest.TestCase):
    def test_keeps_what_fits(self):
        cache = Cache(2)
        cache.set("a", 1)
        cache.set("b", 2)
        self.assertEqual((cache.get("a"), cache.get("b"), len(cache)), (1, 2, 2))

    def test_forgets_the_oldest(self):
        cache = Cache(2)
        for key in "abc":
            cache.set(key, key)
        self.assertNotIn("a", cache)
        self.assertIn("c", cache)

    def test_expires(self):
        clock = Clock()
        cache = Cache(2, ttl=10, clock=clock)
        cache.set("a", 1)
        clock.now = 10
        self.assertIsNone(cache.get("a"))
        self.assertEqual(len(cache), 0)

    def test_pop(self):
        cache = Cache(2)
        cache.set("a", 1)
        self.assertEqual(cache.pop("a"), 1)
        with self.assertRaises(KeyError):
            cache.pop("a")
