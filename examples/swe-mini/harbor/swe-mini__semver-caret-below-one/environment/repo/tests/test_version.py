import unittest

from semver import Version


class VersionTest(unittest.TestCase):
    def test_order_of_releases(self):
        self.assertLess(Version("1.9.0"), Version("1.10.0"))
        self.assertLess(Version("1.10.0"), Version("2.0.0"))

    def test_prereleases_come_first(self):
        self.assertLess(Version("1.0.0-rc.1"), Version("1.0.0"))

    def test_build_says_nothing(self):
        self.assertEqual(Version("1.0.0+linux"), Version("v1.0.0"))

    def test_nonsense(self):
        with self.assertRaises(ValueError):
            Version("1.0")
