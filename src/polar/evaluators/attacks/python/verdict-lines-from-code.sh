# Code under test that prints verdicts, leaves verdict files and ends its process well.
{ sed '/^if /,$d' "$payloads/python-liar"; echo '_end()'; } | begin_sources_with
