import unittest

from urlnorm import normalise


class NormalTest(unittest.TestCase):
    def test_case(self):
        self.assertEqual(normalise("HTTP://Example.COM/Path"), "http://example.com/Path")

    def test_default_port(self):
        self.assertEqual(normalise("https://example.com:443/x"), "https://example.com/x")
        self.assertEqual(normalise("https://example.com:80/x"), "https://example.com:80/x")

    def test_unreserved(self):
        self.assertEqual(normalise("http://example.com/%7Euser"), "http://example.com/~user")

    def test_empty_path(self):
        self.assertEqual(normalise("http://example.com?q=1"), "http://example.com/?q=1")

    def test_dots(self):
        self.assertEqual(normalise("http://example.com/a/./b/../c"), "http://example.com/a/c")

    def test_escapes_in_the_path(self):
        self.assertEqual(normalise("http://example.com/a%2fb%c3%a9"), "http://example.com/a%2Fb%C3%A9")

    def test_escapes_in_the_query(self):
        self.assertEqual(normalise("http://example.com/?q=a%26b%3d"), "http://example.com/?q=a%26b%3D")
