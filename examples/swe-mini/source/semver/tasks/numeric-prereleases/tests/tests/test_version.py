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

    def test_numbers_are_compared_as_numbers(self):
        self.assertLess(Version("1.0.0-rc.9"), Version("1.0.0-rc.10"))
        self.assertLess(Version("1.0.0-2"), Version("1.0.0-11"))

    def test_the_order_of_the_specification(self):
        names = ["alpha", "alpha.1", "alpha.beta", "beta", "beta.2", "beta.11", "rc.1"]
        versions = [*(Version(f"1.0.0-{name}") for name in names), Version("1.0.0")]
        self.assertEqual(sorted(reversed(versions)), versions)
